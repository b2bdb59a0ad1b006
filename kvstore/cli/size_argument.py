"""A size on the command line: bytes, or text like ``4GiB``."""

import argparse

from kvstore.config_values import BadValue, Kind, Rule

_SIZE = Rule("a size", Kind.SIZE, low=1, high=2**60)


def size_argument(text: str) -> int:
    """Return the bytes that an argument says.

    Raises:
        argparse.ArgumentTypeError: it says none.
    """
    try:
        return int(str(_SIZE.read(text)))
    except BadValue as error:
        raise argparse.ArgumentTypeError(str(error)) from None
