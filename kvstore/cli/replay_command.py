"""``kvstore replay``: what a recorded traffic would hit, by policy and capacity, and at most."""

import argparse
import json
import math
import sys
from pathlib import Path

from kvstore.cli.size_argument import size_argument
from kvstore.cli.work_progress import StepLines, add_quiet_argument
from kvstore.errors import InvalidRequest
from kvstore.replay import (
    FORMATS,
    NamedPolicy,
    Prices,
    ReplayPlan,
    TierSize,
    Trace,
    as_dict,
    default_capacities,
    draw_curves,
    lru_curve,
    own_policy,
    policy_names,
    policy_of,
    read_trace,
    replay,
    require_distinct,
    sizing,
    table,
)

_DEFAULT_POLICIES = "lru,arc,s3fifo,gittins,bound"
_MAX_CAPACITY = 2**40


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "replay",
        help="replay recorded traffic through eviction policies, beside the best possible",
        description="Replay a trace of requests through the policies' own code, at several capacities,"
        " without a store. Shows the share of blocks and tokens that would be found, against the most that is"
        " possible with foreknowledge, and what would be written. Exit status: 0 done, 2 usage or a bad"
        " trace.",
    )
    parser.add_argument(
        "trace", metavar="TRACE", help="file of JSON lines, also compressed (.gz); - for stdin"
    )
    _add_reading(parser)
    _add_caching(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help="format of the trace (default: by its first line)")
    parser.add_argument(
        "--block-tokens", type=_count, metavar="N", help="tokens of a block (default: as the trace says)"
    )
    parser.add_argument("--requests", type=_count, metavar="N", help="read only the first N requests")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="count lines that cannot be read instead of ending"
    )


def _add_caching(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"policies, separated by commas (default: {_DEFAULT_POLICIES}); there are"
        f" {', '.join(policy_names())}; with --tiers also one for each tier, fastest first: lru+gittins",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE:CLASS",
        help="a policy of your own in a Python file, which is run; may be repeated",
    )
    parser.add_argument(
        "--capacities",
        metavar="LIST",
        help="capacities in blocks, separated by commas, or sizes like 64GiB with --block-bytes (default:"
        " from a hundredth to all of the trace's blocks)",
    )
    parser.add_argument(
        "--tiers",
        metavar="NAME=SIZE,...",
        help="several tiers instead, fastest first: dram=10000,ssd=100000; what leaves one is written to the"
        " next",
    )
    parser.add_argument(
        "--hint-output-length",
        action="store_true",
        help="tell policies how long each answer is, as far as the trace has it",
    )
    parser.add_argument(
        "--full-blocks-only",
        action="store_true",
        help="do not store the partly filled block at the end of a prompt, as a store of this kind does not",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-bytes", type=size_argument, metavar="SIZE", help="size of a block, to count written bytes"
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=_rate,
        metavar="N",
        help="measured speed of the engine's prefill, to count the seconds that hits save",
    )
    parser.add_argument(
        "--lru-curve",
        action="store_true",
        help="tell and draw what LRU hits at every capacity, and the sizes it needs, in one pass",
    )
    parser.add_argument("--svg", metavar="FILE", help="draw hit rate against capacity into a file")
    add_quiet_argument(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Replay, and print what came of it."""
    policies = _policies(args)
    prices = Prices(args.block_bytes, args.prefill_tokens_per_s)
    tiers = _tiers(args)
    if tiers and args.svg:
        raise InvalidRequest("replay: --svg draws one tier at several capacities: leave out --tiers")
    bar = StepLines(None if args.quiet else sys.stderr)
    try:
        trace = _read(args, bar)
        curve = lru_curve(_stored(trace, args)) if args.lru_curve else None
        plan = ReplayPlan(
            policies, _capacities(args, trace), tiers=tiers, tells_output=args.hint_output_length
        )
        results = replay(_stored(trace, args), plan, bar)
    finally:
        bar.clear()
    shown = sys.stderr if args.json else sys.stdout
    print(table(trace, results, prices), file=shown)
    if curve is not None:
        print(f"\n{sizing(curve, prices)}", file=shown)
    if args.svg:
        Path(args.svg).write_text(draw_curves(results, title=_title(trace), lru=curve), encoding="utf-8")
    if args.json:
        print(json.dumps(as_dict(trace, results, prices, lru=curve)))
    return 0


def _read(args: argparse.Namespace, bar: StepLines) -> Trace:
    path = Path(args.trace)
    is_plain = path.is_file() and path.suffix != ".gz"
    bar.start("reading", path.stat().st_size if is_plain else math.inf)
    return read_trace(
        args.trace,
        format_name=args.format,
        block_tokens=args.block_tokens,
        max_requests=args.requests,
        skip_bad_lines=args.skip_bad_lines,
        report=bar.show,
    )


def _stored(trace: Trace, args: argparse.Namespace) -> Trace:
    return trace.full_blocks_only() if args.full_blocks_only else trace


def _policies(args: argparse.Namespace) -> list[NamedPolicy]:
    named = args.policies if args.policies is not None or args.policy else _DEFAULT_POLICIES
    names = [name.strip() for name in (named or "").split(",") if name.strip()]
    policies = [*map(policy_of, names), *map(own_policy, args.policy)]
    if not policies:
        raise InvalidRequest("replay: --policies names none")
    return require_distinct(policies)


def _capacities(args: argparse.Namespace, trace: Trace) -> list[int]:
    if args.capacities is None:
        return default_capacities(trace)
    texts = [text.strip() for text in args.capacities.split(",") if text.strip()]
    if not texts:
        raise InvalidRequest("replay: --capacities names none")
    return sorted({_capacity(text, args.block_bytes, "--capacities") for text in texts})


def _tiers(args: argparse.Namespace) -> list[TierSize]:
    if args.tiers is None:
        return []
    if args.capacities is not None:
        raise InvalidRequest("replay: --tiers has capacities of its own: leave out --capacities")
    tiers = []
    for text in args.tiers.split(","):
        name, equals, size = text.strip().partition("=")
        if not name or not equals:
            raise InvalidRequest(f"replay: --tiers: {text.strip()!r}, expected NAME=SIZE")
        tiers.append(TierSize(name, _capacity(size, args.block_bytes, "--tiers")))
    if len({tier.name for tier in tiers}) != len(tiers):
        raise InvalidRequest("replay: --tiers names a tier twice")
    return tiers


def _capacity(text: str, block_bytes: int | None, argument: str) -> int:
    if text.isdecimal():
        blocks = int(text)
    elif block_bytes is None:
        raise InvalidRequest(
            f"replay: {argument}: {text!r}, expected a number of blocks; a size needs --block-bytes"
        )
    else:
        try:
            blocks = size_argument(text) // block_bytes
        except argparse.ArgumentTypeError as error:
            raise InvalidRequest(f"replay: {argument}: {error}") from error
    if not 1 <= blocks <= _MAX_CAPACITY:
        raise InvalidRequest(f"replay: {argument}: {text} is {blocks} blocks, expected 1 to {_MAX_CAPACITY}")
    return blocks


def _title(trace: Trace) -> str:
    name = Path(trace.source).name
    return f"Hit blocks of {name}: {trace.requests} requests, {trace.unique_blocks} blocks"


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**40:
        raise argparse.ArgumentTypeError(f"is {text}, expected a whole number from 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, expected a number above 0")
    return rate
