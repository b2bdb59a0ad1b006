"""``python -m kvstore.cli``: the command ``kvstore`` where its script is not on the path."""

import sys

from kvstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
