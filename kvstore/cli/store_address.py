"""The arguments by which client commands find a store."""

import argparse

from kvstore.client import KVStore
from kvstore.client_state import Timeouts
from kvstore.config import client_credentials, default_address
from kvstore.errors import InvalidRequest
from kvstore.server_address import parse_http_address


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --store, --timeout and --json."""
    add_address_arguments(parser, timed="the command")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")


def add_address_arguments(parser: argparse.ArgumentParser, *, timed: str) -> None:
    """Add --store and --timeout, which is the time for what ``timed`` says."""
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="the server's socket, unix:/path or a path, or http(s)://host:port with the key in"
        " $KVSTORE_API_KEY (default: $KVSTORE_SOCKET, else the default socket)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help=f"time for {timed} (default: %(default)g)",
    )


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
    address = args.store or default_address()
    api_key, tls_folder = client_credentials() if parse_http_address(address) else (None, None)
    client = KVStore.connect(address, timeouts=timeouts, api_key=api_key, tls_folder=tls_folder)
    try:
        client.ping()
    except BaseException:
        client.close()
        raise
    return client
