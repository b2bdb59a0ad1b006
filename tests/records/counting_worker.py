"""A process that counts in a record: ``python -m tests.records.counting_worker SOCKET TIMES``.

It reads a number and puts the next one, if nobody else did, and prints each version that it replaced.
"""

import sys

from kvstore import KVStore, RecordOutcome


def main(socket_path: str, times: int) -> None:
    with KVStore.connect(socket_path, timeout_s=20) as client:
        won = 0
        while won < times:
            record = client.get_record("c", "n")
            assert record is not None, (won, client.client_stats())
            value = b"%d" % (int(record.value) + 1)
            write = client.put_record("c", "n", value, if_version=record.version)
            if write.is_stored:
                won += 1
                sys.stdout.write(f"{record.version}\n")
            else:
                assert write.outcome is RecordOutcome.CONFLICT, write


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
