"""Speed of the same-host data plane, client and server in processes of their own, beside memcpy.

blocks    put, fetch_into, view, and fetch_into with the checks off (only to know their price), one block
          and a batch at a time; beside them memcpy (numpy.copyto between two private buffers of the same
          shape) and bare (a round trip over a Unix socket between two Python processes, and the copy)
overhead  the same for requests of many small blocks, where little is copied
lookups   match of 6250 keys, exists of 1000
load      match while no, one or two other clients copy flat out
chain     100 000 tokens hashed into keys

--peers adds other stores to blocks and lookups, in turn. Medians of rounds in changing order, each begun with
cold caches; ratio_to_memcpy is of the same run, ratio_low and ratio_high of single rounds, cpu_s_per_gb of
client and server. See docs/data_plane.md.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure.asked import BATCH, LARGE, OVERHEAD_BATCHES, SMALL, TINY
from measure.blocks import measure_blocks
from measure.figures import Bench, Row
from measure.load import measure_load
from measure.lookups import measure_chain, measure_lookups
from measure.record import Record, make_record
from peers import ADAPTERS, obstacle

PARTS = ("blocks", "overhead", "lookups", "load", "chain")
BLOCK_BYTES = [SMALL, 512 << 10, LARGE, 8 << 20]
MAX_BATCH_BYTES = 256 << 20
SET_BYTES = 128 << 20
"""Payload that one round moves: far more than the caches hold."""


def measure(args: argparse.Namespace, names: Sequence[str]) -> Bench:
    """Measure every row."""
    bench = Bench()
    if "blocks" in args.parts:
        for block_bytes in args.block_bytes:
            for batch in sorted({1, min(BATCH, MAX_BATCH_BYTES // block_bytes)}):
                _measure_blocks(bench, args, names, (block_bytes, batch))
    if "overhead" in args.parts:
        for batch in OVERHEAD_BATCHES:
            _measure_blocks(bench, args, (), (TINY, batch))
    if "lookups" in args.parts:
        measure_lookups(bench, names, args.rounds)
    if "load" in args.parts:
        block_bytes = min(LARGE, max(args.block_bytes))
        measure_load(bench, block_bytes=block_bytes, batch=BATCH, rounds=args.rounds)
    if "chain" in args.parts:
        measure_chain(bench, args.rounds)
    return bench


def _measure_blocks(
    bench: Bench, args: argparse.Namespace, names: Sequence[str], size: tuple[int, int]
) -> None:
    block_bytes, batch = size
    # Where a round has two calls there are twice as many rounds.
    rounds = args.rounds * (2 if 2 * block_bytes * batch > args.set_bytes else 1)
    measure_blocks(
        bench, names, block_bytes=block_bytes, batch=batch, set_bytes=args.set_bytes, rounds=rounds
    )


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    for row in rows:
        copied = ""
        if row["gb_per_s"] is not None:
            copied = f"{row['gb_per_s']:>7.2f} GB/s  {row['ratio_to_memcpy']:>5.2f} of memcpy  "
            copied += f"{row['cpu_s_per_gb']:>6.2f} CPU s/GB"
        print(
            f"{row['peer']:13} {row['op']:22}{row['block_bytes']:>9} B x{row['batch']:<6}"
            f"p50 {row['p50_us']:>9} us  p99 {row['p99_us']:>9} us {copied}".rstrip()
        )


def chosen_peers(words: str) -> tuple[list[str], dict[str, str]]:
    """Return the peers that can be measured here, and why the others that were asked for cannot.

    Raises:
        ValueError: there is no such peer.
    """
    asked = [*ADAPTERS] if words == "all" else [name for name in words.split(",") if name]
    for name in asked:
        if name not in ADAPTERS:
            raise ValueError(f"no peer {name}; there are {', '.join(ADAPTERS)}")
    obstacles = {name: obstacle(name) for name in asked}
    return [name for name in asked if not obstacles[name]], {k: v for k, v in obstacles.items() if v}


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    peers_help = "; ".join(f"{name}: {adapter.what}" for name, adapter in ADAPTERS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", default="", help=f"comma separated, or all. {peers_help}")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=BLOCK_BYTES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--set-bytes", type=int, default=SET_BYTES, help="payload that one round moves")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw the figures into a folder")
    parser.add_argument(
        "--page",
        type=Path,
        help="rewrite the tables of a page, keep the figures beside it as JSON, and draw them there",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="JSON", help="measure nothing, take the figures of an earlier run"
    )
    return parser


def _tell(left_out: Mapping[str, str]) -> None:
    for name, reason in left_out.items():
        print(f"data_plane: peer {name} is left out: {reason}", file=sys.stderr)


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    parser = arguments()
    args = parser.parse_args()
    if TINY in args.block_bytes:
        parser.error(f"--block-bytes: blocks of {TINY} bytes are measured by --parts overhead")
    if args.figures:
        record = Record.read(args.figures)
    else:
        try:
            names, left_out = chosen_peers(args.peers)
        except ValueError as error:
            parser.error(str(error))
        _tell(left_out)
        load = round(os.getloadavg()[0], 1)
        bench = measure(args, names)
        _tell(bench.failed)
        record = make_record(bench.rows(), names, left_out | bench.failed, rounds=args.rounds, load=load)
    show(record.results)
    if args.svg or args.page:
        # Imported here because drawing needs matplotlib, which measuring does not.
        from measure.plots import draw

        draw(record, args.svg or args.page.parent)
    if args.page:
        from measure.page import rewrite

        record.write(args.page.with_suffix(".json"))
        rewrite(args.page, record)
    if args.json:
        print(record.line())


if __name__ == "__main__":
    main()
