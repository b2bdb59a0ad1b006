"""Walk an ssd index in a process of its own: ``python -m kvstore_tiers.ssd_check FOLDER CAPACITY_BYTES``.

A damaged LMDB file can kill the process that opens it (SIGBUS). After an unclean end the tier lets this
process die first. Exit status 0: the index was read and may be used.
"""

import sys
from pathlib import Path

import lmdb

from kvstore_tiers.ssd_index import IndexIsForeign, SsdIndex

EXIT_UNUSABLE = 3
"""Exit status for an index that was refused in an orderly way."""


def main(arguments: list[str]) -> int:
    """Open, read everything, start and abandon a write."""
    folder, capacity_bytes = arguments
    try:
        index = SsdIndex.open(Path(folder), capacity_bytes=int(capacity_bytes))
        index.load()
        index.try_to_write()
        index.close()
    except (lmdb.Error, OSError, IndexIsForeign) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
