"""The process that lends its memory to a Mooncake Store: ``mooncake_segment.py MASTER SEGMENT_BYTES``.

It writes a line when it serves, and ends with its standard input.
"""

import sys

from mooncake.store import MooncakeDistributedStore


def main() -> None:
    """Mount the segment and wait."""
    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master)
    if status != 0:
        sys.exit(f"mooncake: the segment cannot be mounted: status {status}")
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
