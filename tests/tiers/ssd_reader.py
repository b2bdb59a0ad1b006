"""A process that uses an ssd folder without writing blocks until it is killed: ``... FOLDER NUMBER...``."""

import asyncio
import sys
from pathlib import Path

from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import block_id

CAPACITY = 4 << 20


async def main(folder: Path, numbers: list[int]) -> None:
    tier = SsdTier(folder, capacity_bytes=CAPACITY, renew_interval_s=0.02)
    await tier.open()
    commits = tier.counters["commits"]
    await tier.touch([block_id(number) for number in numbers])
    while tier.counters["commits"] == commits or tier._commits._pending:  # noqa: ASYNC110  # seen from outside
        await asyncio.sleep(0.01)
    sys.stdout.write("stored\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
