"""The arguments by which client commands find a store."""

import argparse

from kvstore.client import KVStore
from kvstore.client_state import Timeouts
from kvstore.config import default_address
from kvstore.errors import InvalidRequest


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --store, --timeout and --json."""
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="the server's socket, unix:/path or a path (default: $KVSTORE_SOCKET, else the default socket)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="time for the command (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")


def connected(args: argparse.Namespace) -> KVStore:
    """Return a client whose server has answered.

    Raises:
        ServerUnavailable: none answers.
        InvalidConfig: the address is malformed.
        InvalidRequest: the time is not positive.
    """
    seconds = args.timeout
    if not 0 < seconds <= 3600:
        raise InvalidRequest(f"--timeout is {seconds:g}, expected seconds above 0, at most 3600")
    timeouts = Timeouts(match_s=seconds, fetch_s=seconds, put_s=seconds, control_s=seconds)
    client = KVStore.connect(args.store or default_address(), timeouts=timeouts)
    try:
        client.ping()
    except BaseException:
        client.close()
        raise
    return client
