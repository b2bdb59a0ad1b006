"""``kvstore stats`` and ``kvstore check``: what a running store holds, and whether it is sound."""

import argparse
import json

from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.cli.work_progress import Checked, add_quiet_argument, progress_of_store
from kvstore.errors import InvalidRequest

_MAX_SAMPLE_BLOCKS = 1_000_000


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands to the command line's parser."""
    stats = subparsers.add_parser(
        "stats",
        help="show a store's counters and occupancy",
        description="Show a store's counters and occupancy. Exit status: 0 shown, 2 usage, 3 no server.",
    )
    add_store_arguments(stats)
    stats.set_defaults(run=run_stats)

    check = subparsers.add_parser(
        "check",
        help="verify a store's invariants and a sample of checksums",
        description="Verify a store's invariants and a sample of checksums. Exit status: 0 sound,"
        " 1 violations found, 2 usage, 3 no server.",
    )
    check.add_argument(
        "--sample", type=int, default=64, metavar="BLOCKS", help="blocks to verify (default: %(default)d)"
    )
    add_quiet_argument(check)
    add_store_arguments(check)
    check.set_defaults(run=run_check)


def run_stats(args: argparse.Namespace) -> int:
    """Print the counters."""
    with connected(args) as client:
        stats = client.stats()
    if args.json:
        print(json.dumps(stats))
        return 0
    for name, value in _flat(stats, ""):
        print(f"{name:<48} {value}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print one line per violation; 0 if there is none."""
    if not 0 <= args.sample <= _MAX_SAMPLE_BLOCKS:
        raise InvalidRequest(f"--sample is {args.sample}, expected 0..{_MAX_SAMPLE_BLOCKS}")
    with connected(args) as client:
        checked = Checked(client.stats(), args.sample)
        with progress_of_store(args, "checking", checked):
            violations = client.check(args.sample)
    if args.json:
        print(json.dumps({"ok": not violations, "violations": violations}))
    else:
        print("\n".join(violations) or "sound")
    return 1 if violations else 0


def _flat(value: dict[str, object], prefix: str) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = []
    for name, item in value.items():
        if isinstance(item, dict):
            lines += _flat(item, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", item))
    return lines
