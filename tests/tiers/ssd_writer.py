"""A process that writes, replaces and drops blocks in an ssd folder until it is killed.

``python -m tests.tiers.ssd_writer FOLDER FIRST_NUMBER``: says ``start N V`` before and ``ack N V`` after each
write of version V of block N, and the same with ``drop``.
"""

import asyncio
import sys
import time
from pathlib import Path

from kvstore.tier import WriteStatus
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import block_id, to_write

CAPACITY = 24 << 20
LENGTH = 100_000


def say(*words: object) -> None:
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


async def main(folder: Path, first: int) -> None:
    tier = SsdTier(folder, capacity_bytes=CAPACITY)
    await tier.open()
    say("open")
    for step in range(10_000):
        number, version = (first + step) % 60, first + step
        say("start", number, version)
        requests = [to_write(number, LENGTH, version=version)]
        assert await tier.write(requests, deadline_s=time.monotonic() + 60) == [WriteStatus.OK]
        say("ack", number, version)
        if step % 7 == 6:
            say("start-drop", number)
            await tier.drop([block_id(number)])
            say("drop", number)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
