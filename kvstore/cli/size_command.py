"""``kvstore size``: the hit rate that a store would have with more or less room."""

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvstore.cli.block_naming import read_digest
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.config_values import parse_bytes
from kvstore.errors import InvalidRequest
from kvstore.sizing import MULTIPLES, reach_bytes

_TIERS = ("dram", "ssd")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    size = subparsers.add_parser(
        "size",
        help="estimate the hit rate that a store would have with more or less room",
        description="Estimate the hit rate of a store's lookups, in blocks, at its size, at multiples of it,"
        " and with more room. The estimate stands for least recently used eviction on this node; remote"
        " hits are not in it. Exit status: 0 estimated, 1 too few samples yet, 2 usage, 3 no server.",
    )
    size.add_argument(
        "--add", metavar="BYTES", help="room to add to a tier, such as 100GiB; -1GiB takes away"
    )
    size.add_argument(
        "--tier",
        choices=_TIERS,
        help="the tier that --add is about (default: ssd if there is one, else dram)",
    )
    size.add_argument(
        "--namespace", metavar="HEX", help="count the lookups in one namespace only, named by its digest"
    )
    add_store_arguments(size)
    size.set_defaults(run=run_size)


def run_size(args: argparse.Namespace) -> int:
    """Print the estimates; 1 if there are too few samples for one that was asked for."""
    add_bytes = None if args.add is None else _signed_size(args.add)
    namespace = None if args.namespace is None else read_digest(args.namespace)
    with connected(args) as client:
        told = client.size_curve(namespace)
    if not told.get("is_on"):
        raise InvalidRequest("size: the store does not estimate hit rates by size: its log says why")
    answer = answer_for(told, add_bytes, args.tier)
    if args.json:
        print(json.dumps(answer))
    else:
        print("\n".join(_lines(told, answer)))
    asked = "now" if add_bytes is None else "then"
    return 0 if answer[asked]["hit_ratio"] is not None and answer["now"]["hit_ratio"] is not None else 1


def answer_for(told: dict[str, Any], add_bytes: int | None, tier: str | None) -> dict[str, Any]:  # Any: JSON
    """Return hit rates now, and ``then`` with ``add_bytes`` more in a tier.

    Raises:
        InvalidRequest: the tier would have less than nothing.
    """
    capacities: dict[str, int] = told["capacity_bytes"]
    now_bytes = reach_bytes(capacities.values(), told["write_mode"])
    answer: dict[str, Any] = {  # Any: JSON
        "now": {"size_bytes": now_bytes, "hit_ratio": hit_ratio_at(told["points"], now_bytes)},
        "lookups_blocks": told["lookups_blocks"],
        "samples": told["samples"],
        "min_samples": told["min_samples"],
        "limit_bytes": told["limit_bytes"],
        "hit_ratio": told["hit_ratio"],
        "size_bytes": told["size_bytes"],
    }
    if add_bytes is not None:
        chosen = tier or ("ssd" if "ssd" in capacities else "dram")
        changed = {**capacities, chosen: capacities.get(chosen, 0) + add_bytes}
        if changed[chosen] < 0:
            raise InvalidRequest(f"--add: {chosen} has {_text(capacities.get(chosen, 0))}, not that much")
        then_bytes = reach_bytes(changed.values(), told["write_mode"])
        answer["then"] = {
            "tier": chosen,
            "add_bytes": add_bytes,
            "size_bytes": then_bytes,
            "hit_ratio": hit_ratio_at(told["points"], then_bytes),
        }
    return answer


def hit_ratio_at(points: Sequence[Sequence[float | None]], size_bytes: float) -> float | None:
    """Return the hit rate at a size between points of size and hit rate; None where they do not tell."""
    for (low, low_ratio), (high, high_ratio) in pairwise(points):
        assert low is not None, "a point has a size"
        assert high is not None, "a point has a size"
        if size_bytes in (low, high):
            return low_ratio if size_bytes == low else high_ratio
        if low < size_bytes < high:
            if low_ratio is None or high_ratio is None:
                return None
            return round(low_ratio + (high_ratio - low_ratio) * (size_bytes - low) / (high - low), 4)
    return None


def _lines(told: dict[str, Any], answer: dict[str, Any]) -> list[str]:  # Any: JSON
    now, then = answer["now"], answer.get("then")
    lines = [
        f"{told['lookups_blocks']} lookups, {told['samples']} of them sampled",
        f"now       {_text(now['size_bytes']):>10}  {_ratio(now['hit_ratio'])}",
    ]
    if then is not None:
        sign = "+" if then["add_bytes"] >= 0 else "-"
        line = f"then      {_text(then['size_bytes']):>10}  {_ratio(then['hit_ratio'])}"
        if then["hit_ratio"] is not None and now["hit_ratio"] is not None:
            line += f"  ({then['hit_ratio'] - now['hit_ratio']:+.3f})"
        lines.append(f"{line}  {sign}{_text(abs(then['add_bytes']))} {then['tier']}")
        if then["size_bytes"] > told["limit_bytes"]:
            lines.append(f"nothing is known beyond {_text(told['limit_bytes'])}, 4 times what there is")
    for of, size_bytes in told["size_bytes"].items():
        for name, ratio in MULTIPLES.items():
            text = _text(size_bytes * ratio)
            lines.append(f"{of:<4} {name:>4} {text:>10}  {_ratio(told['hit_ratio'][of][name])}")
    if told["samples"] < told["min_samples"]:
        lines.append(f"too few samples: estimates need {told['min_samples']}; ask again under load")
    return lines


def _ratio(ratio: float | None) -> str:
    return "too few samples" if ratio is None else f"{ratio:.3f}"


def _signed_size(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    num_bytes = parse_bytes(text.removeprefix("-"))
    if num_bytes is None:
        raise InvalidRequest(f'--add is "{text}", expected bytes such as 100GiB')
    return int(sign * num_bytes)


def _text(num_bytes: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
