"""Read records in a process of its own: ``python -m kvstore_tiers.record_check FOLDER CAPACITY_BYTES``.

A damaged LMDB file can kill the process that reads it (SIGBUS). After an unclean end the store lets this
process die first. Exit status 0: they may be used; 3: damaged; any other: could not be examined.
"""

import sys
from pathlib import Path

import lmdb

from kvstore_tiers.record_disk import EXIT_UNUSABLE, examine
from kvstore_tiers.ssd_check import EXIT_NOT_EXAMINED, is_lacking


def main(arguments: list[str]) -> int:
    """Read everything, begin and abandon a change."""
    folder, capacity_bytes = arguments
    try:
        examine(Path(folder), int(capacity_bytes))
    except (lmdb.Error, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_EXAMINED if is_lacking(error) else EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
