"""Walk an ssd index in a process of its own: ``python -m kvstore_tiers.ssd_check FOLDER CAPACITY_BYTES``.

A damaged LMDB file can kill the process that opens it (SIGBUS). After an unclean end the tier lets this
process die first. Exit status 0: the index was read and may be used; 3: it is damaged; any other: it could
not be examined, which says nothing about it.
"""

import contextlib
import errno
import os
import sys
from pathlib import Path

import lmdb

from kvstore_tiers.ssd_index import IndexIsForeign, SsdIndex

EXIT_UNUSABLE = 3
"""Exit status for an index that was refused in an orderly way."""

EXIT_NOT_EXAMINED = 4
"""Exit status when this process lacked what it needs to look: memory, descriptors, space, permissions."""

_LACKING = tuple(
    os.strerror(number)
    for number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    )
)


def main(arguments: list[str]) -> int:
    """Open, read everything, start and abandon a write."""
    folder, capacity_bytes = arguments
    try:
        index = SsdIndex.open_unreserved(Path(folder), capacity_bytes=int(capacity_bytes))
        # Of another format: that it can be read is enough, since whoever opens it next lets go of it.
        with contextlib.suppress(IndexIsForeign):
            index.load()
            index.try_to_write()
        index.close()
    except (lmdb.Error, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_EXAMINED if is_lacking(error) else EXIT_UNUSABLE
    return 0


def is_lacking(error: Exception) -> bool:
    """Whether an error says that this process lacked something: py-lmdb gives the system's only as text."""
    return any(text in str(error) for text in _LACKING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
