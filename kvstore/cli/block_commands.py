"""``kvstore put``, ``get`` and ``match``: store, fetch and look for blocks."""

import argparse
import json
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvstore.cli.block_naming import add_naming_arguments, opened, read_blocks
from kvstore.cli.output_file import remove_output, replace_output
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.errors import InvalidRequest
from kvstore.miss import MissReason


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands to the command line's parser."""
    put = subparsers.add_parser(
        "put",
        help="store blocks",
        description="Store blocks, read back to back from a file or stdin. Exit status: 0 all are stored,"
        " 1 some found no room, 2 bad input, 3 no server.",
    )
    add_naming_arguments(put)
    put.add_argument("--in", dest="source", metavar="FILE", default="-", help="payloads (default: stdin)")
    add_store_arguments(put)
    put.set_defaults(run=run_put)

    get = subparsers.add_parser(
        "get",
        help="fetch the longest stored prefix",
        description="Fetch the longest stored prefix into a file, blocks back to back. The file is replaced"
        " whole; where nothing is stored, it is removed. Exit status: 0 at least one block, 1 none is stored,"
        " 2 bad input, 3 no server.",
    )
    add_naming_arguments(get)
    get.add_argument("--out", metavar="FILE", required=True, help="where to write the blocks; - for stdout")
    add_store_arguments(get)
    get.set_defaults(run=run_get)

    match = subparsers.add_parser(
        "match",
        help="count the leading blocks that are stored",
        description="Count the leading blocks that are stored, and say where. Exit status: 0 at least one,"
        " 1 none is stored, 2 bad input, 3 no server.",
    )
    add_naming_arguments(match)
    add_store_arguments(match)
    match.set_defaults(run=run_match)


def run_put(args: argparse.Namespace) -> int:
    """Store blocks; 0 if all are stored now."""
    namespace, chain = read_blocks(args)
    block_bytes = namespace.layout.block_bytes
    if args.source == "-":
        payload = _read_exactly(sys.stdin.buffer, len(chain), block_bytes, "stdin")
    else:
        with Path(args.source).open("rb") as file:
            payload = _read_exactly(file, len(chain), block_bytes, args.source)
    with connected(args) as client:
        _, chain = opened(client, namespace, args)
        result = client.put(chain, payload)
    if args.json:
        counts = {"stored": result.stored, "present": result.present, "dropped": result.dropped}
        print(json.dumps({**counts, "reason": None if result.reason is None else result.reason.value}))
    else:
        why = "" if result.reason is None else f": {result.reason.value}"
        print(f"{result.stored} stored, {result.present} present before, {result.dropped} dropped{why}")
    return 1 if result.dropped else 0


def run_get(args: argparse.Namespace) -> int:
    """Fetch blocks; 0 if there is at least one."""
    if args.out == "-" and args.json:
        raise InvalidRequest("--out -: the blocks would mix with the JSON: name a file")
    namespace, chain = read_blocks(args)
    block_bytes = namespace.layout.block_bytes
    with connected(args) as client:
        _, chain = opened(client, namespace, args)
        # What is not stored needs no memory here.
        found = client.match(chain)
        buffer = np.empty(found.blocks * block_bytes, np.uint8)
        result = client.fetch_into(chain[: found.blocks], buffer)
        reason = result.reason or found.reason
    report: dict[str, object] = {"blocks": result.blocks, "of": len(chain), "tiers": list(result.origins)}
    if result.blocks:
        _write_blocks(args.out, buffer.data[: result.blocks * block_bytes])
    elif remove_output(args.out):
        report["removed"] = args.out
    _print_found(args, report, reason, to_stderr=args.out == "-")
    return 0 if result.blocks else 1


def run_match(args: argparse.Namespace) -> int:
    """Look for blocks; 0 if there is at least one."""
    namespace, _ = read_blocks(args)
    with connected(args) as client:
        _, chain = opened(client, namespace, args)
        found = client.match(chain)
    report = {"blocks": found.blocks, "of": len(chain), "tiers": list(found.tiers)}
    _print_found(args, report, found.reason, to_stderr=False)
    return 0 if found.blocks else 1


def _print_found(
    args: argparse.Namespace, report: dict[str, object], reason: MissReason | None, *, to_stderr: bool
) -> None:
    if args.json:
        print(json.dumps({**report, "reason": None if reason is None else reason.value}))
        return
    tiers = report["tiers"]
    assert isinstance(tiers, list)
    where = ", ".join(f"{tiers.count(tier)} {tier}" for tier in dict.fromkeys(tiers))
    line = f"{report['blocks']} of {report['of']} blocks"
    line += f" ({where})" if where else ""
    line += f"; the next one: {reason.value}" if reason is not None else ""
    line += f"; removed {report['removed']}" if "removed" in report else ""
    print(line, file=sys.stderr if to_stderr else sys.stdout)


def _read_exactly(file: BinaryIO, num_blocks: int, block_bytes: int, where: str) -> bytes:
    wanted_bytes = num_blocks * block_bytes
    payload = file.read(wanted_bytes + 1)
    if len(payload) != wanted_bytes:
        found = "more" if len(payload) > wanted_bytes else str(len(payload))
        raise InvalidRequest(
            f"{where}: {found} bytes, expected {wanted_bytes}: {num_blocks} blocks of {block_bytes} bytes"
        )
    return payload


def _write_blocks(path: str, blocks: memoryview) -> None:
    if path == "-":
        sys.stdout.buffer.write(blocks)
        sys.stdout.buffer.flush()
        return
    replace_output(path, blocks)
