"""``kvstore drill``: inject faults into real parts and check every promise."""

import argparse
import json
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from kvstore.cli.work_progress import add_quiet_argument
from kvstore.progress import ProgressBar

if TYPE_CHECKING:
    from kvstore.drill import Fault


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "drill",
        help="inject faults into real parts and check every promise",
        description="Start a store, clients and a Redis-protocol server of its own, inject faults into them"
        " (kills, full disks, bit flips, stopped servers and more), and check after each that no wrong byte"
        " was served, nothing durable was lost, no call took longer than its time, and the store is sound."
        " Touches nothing but what it started. The last line says how many kinds of fault were tried, and how"
        " many skipped. Exit status: 0 every promise was kept in those that were tried, 1 one was broken, 2"
        " usage.",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=120.0, metavar="N", help="time to take (default: 120)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of every random choice (default: random)")
    parser.add_argument(
        "--fault", action="append", metavar="NAME", help="try only this kind; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the kinds of fault and end")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--keep", action="store_true", help="keep folders, configurations and logs")
    add_quiet_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the drill; progress goes to stderr, the result to stdout."""
    # The store's packages are an extra: the client's commands work without them.
    try:
        from kvstore.drill import all_faults
    except ImportError as error:
        print(
            f"kvstore: drill needs {error.name}: pip install 'tiered-kvstore[server,demo]'", file=sys.stderr
        )
        return 2
    known = {fault.name: fault for fault in all_faults()}
    if args.list:
        _list(list(known.values()), as_json=args.json)
        return 0
    unknown = [name for name in args.fault or () if name not in known]
    if unknown:
        print(f"kvstore: drill: no fault named {unknown[0]}: see kvstore drill --list", file=sys.stderr)
        return 2
    chosen = [known[name] for name in dict.fromkeys(args.fault or known)]
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _drill(chosen, args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _drill(faults: "list[Fault]", args: argparse.Namespace) -> int:
    # An extra, see run().
    from kvstore.drill import DrillSettings, run_drill
    from kvstore.drill.report import report_table

    seed = args.seed if args.seed is not None else time.time_ns() % 1_000_000
    started_s = time.monotonic()

    bar = ProgressBar(sys.stderr)

    def say(line: str) -> None:
        if args.quiet:
            return
        took_s = time.monotonic() - started_s
        bar.clear()
        print(f"[{took_s:5.1f} s] {line}", file=sys.stderr, flush=True)
        bar.show(took_s)

    if not args.quiet:
        bar.start("drill", args.seconds)
    say(f"{len(faults)} kinds of fault, {args.seconds:.0f} s, seed {seed}")
    try:
        report = run_drill(DrillSettings(faults, seconds=args.seconds, seed=seed, keep=args.keep), say)
    finally:
        bar.clear()
    print(report_table(report), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(report.as_dict()))
    return 0 if report.is_ok else 1


def _list(faults: "list[Fault]", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({fault.name: fault.description for fault in faults}))
        return
    width = max(len(fault.name) for fault in faults)
    for fault in faults:
        print(f"{fault.name.ljust(width)}  {fault.description}")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"is {text}, expected 1 to 86400")
    return seconds


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
