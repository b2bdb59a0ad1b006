"""``kvstore top``: watch a running store."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from kvstore.cli.store_address import add_address_arguments, connected
from kvstore.cli.watching import Watch
from kvstore.config import default_address
from kvstore.errors import InvalidRequest, KVStoreError

_MIN_INTERVAL_S = 0.1
_MAX_INTERVAL_S = 3600.0


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "top",
        help="watch a store: hit rates, occupancy, transfers, misses, faults",
        description="Watch a store: hit rates, occupancy, transfers, misses by reason, leases, faults."
        " q or Ctrl-C ends it. Where the output is no terminal, it shows the state once. Each sample is one"
        " request for stats. Exit status: 0 ended, 2 usage, 3 no server at the start; one that goes away"
        " later is waited for.",
    )
    parser.add_argument("--once", action="store_true", help="show the state once, as plain text, and end")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on a line per sample, with --once a single one"
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        default=2.0,
        help="time between samples (default: %(default)g)",
    )
    parser.add_argument(
        "--lookups",
        choices=("fetch", "match"),
        default="fetch",
        help="which lookups' hits and misses to show (default: %(default)s)",
    )
    add_address_arguments(parser, timed="each sample")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the store until told to stop."""
    if not _MIN_INTERVAL_S <= args.interval <= _MAX_INTERVAL_S:
        raise InvalidRequest(
            f"--interval is {args.interval:g}, expected {_MIN_INTERVAL_S:g}..{_MAX_INTERVAL_S:g} seconds"
        )
    with contextlib.suppress(KeyboardInterrupt), _interrupted_by_sigterm(), connected(args) as client:
        watch = Watch(client.stats, of=args.lookups)
        if args.json:
            _print_samples(watch, args)
        else:
            _show(watch, args)
    return 0


def _print_samples(watch: Watch, args: argparse.Namespace) -> None:
    print(json.dumps(watch.first().as_dict()), flush=True)
    while not args.once:
        time.sleep(args.interval)
        print(json.dumps(watch.next().as_dict()), flush=True)


def _show(watch: Watch, args: argparse.Namespace) -> None:
    try:
        # Rich is an optional package, and nothing else needs it.
        from kvstore.cli import top_view
    except ModuleNotFoundError as error:
        raise KVStoreError(
            f"top: needs the package {error.name}: pip install 'tiered-kvstore[top]', or use --json"
        ) from error
    address = args.store or str(default_address())
    is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if args.once or not is_live:
        watch.first()
        top_view.print_once(watch, address)
    else:
        top_view.show_live(watch, address, interval_s=args.interval)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the command as Ctrl-C does, so that it leaves the terminal as it was."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
