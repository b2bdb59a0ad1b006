"""A process that puts records on disk until it is killed.

``python -m tests.records.record_writer FOLDER ROUND``. It says ``begin N V`` before and ``ack N V`` after
each put of version V of record N.
"""

import asyncio
import sys
from pathlib import Path

from tests.record_kit import Kit
from tests.records.test_record_disk import NUMBERS, value_of


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(folder: Path, round_: int) -> None:
    async with Kit(folder.parent).store(folder.name) as store:

        async def put(number: int, version: int) -> None:
            say("begin", number, version)
            assert (await store.set(f"n{number}", value_of(number, version))).is_stored
            say("ack", number, version)

        for step in range(10_000):
            version = (round_ * 1000 + step) % 97
            first = 3 * step % len(NUMBERS)
            await asyncio.gather(*(put(number, version) for number in range(first, first + 3)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
