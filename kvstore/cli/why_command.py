"""``kvstore why``: explain a prompt's blocks one by one."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TypedDict

from kvstore.cli.block_naming import add_naming_arguments, opened, read_blocks, read_tokens
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.client import KVStore
from kvstore.errors import Forbidden
from kvstore.keys import Namespace
from kvstore.miss import MissReason
from kvstore.results import BlockReport, first_difference

_SHOWN_BLOCKS = 8


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    why = subparsers.add_parser(
        "why",
        help="explain block by block what is stored, and why the rest is not",
        description="Explain a prompt's blocks: where each is stored; for the first that is not, why, since"
        " when, and by whose pressure; and whether the same tokens are stored under a namespace that differs."
        " Exit status: 0 all blocks are stored, 1 some are not, 2 bad input, 3 no server.",
    )
    add_naming_arguments(why)
    add_store_arguments(why)
    why.set_defaults(run=run_why)


def run_why(args: argparse.Namespace) -> int:
    """Explain; 0 if every block is stored."""
    described, _ = read_blocks(args)
    tokens = read_tokens(args)
    with connected(args) as client:
        namespace, chain = opened(client, described, args)
        reports = client.why(chain)
        first = first_difference(reports)
        elsewhere = [] if first is None else _elsewhere(client, namespace, tokens)
    if elsewhere and first == 0 and reports[0].reason is MissReason.NEVER_SEEN:
        is_epoch = all(set(hit["differs"]) == {"epoch"} for hit in elsewhere)
        reason = MissReason.OTHER_EPOCH if is_epoch else MissReason.OTHER_NAMESPACE
        reports[0] = dataclasses.replace(reports[0], reason=reason)
    if args.json:
        blocks = [report.as_dict() for report in reports]
        print(json.dumps({"of": len(chain), "first_miss": first, "elsewhere": elsewhere, "blocks": blocks}))
    else:
        _print(reports, first, elsewhere, of=len(chain))
    return 0 if first is None else 1


class Elsewhere(TypedDict):
    """Leading blocks of the same tokens in another namespace, and the fields in which it differs."""

    blocks: int
    differs: dict[str, list[str]]


def _elsewhere(client: KVStore, namespace: Namespace, tokens: Sequence[int]) -> list[Elsewhere]:
    """Look for the same tokens in namespaces of the model that differ from ours; salts are never told."""
    found: list[Elsewhere] = []
    try:
        others = client.namespaces()
    except Forbidden:  # over HTTP, with a key that is not an administrator's
        return []
    for other in others:
        variant = dataclasses.replace(other, tenant_salt=namespace.tenant_salt)
        if other.model != namespace.model or variant == namespace:
            continue
        client.open_namespace(variant)
        # An ended epoch is not matched, so its blocks are asked for one by one.
        reports = client.why(variant.chain(tokens))
        blocks = next((i for i, report in enumerate(reports) if not report.tiers), len(reports))
        if blocks:
            found.append({"blocks": blocks, "differs": _differences(namespace, variant)})
    return found


def _differences(ours: Namespace, theirs: Namespace) -> dict[str, list[str]]:
    one, other = _flat(ours), _flat(theirs)
    return {name: [str(one[name]), str(other[name])] for name in one if one[name] != other[name]}


def _flat(namespace: Namespace) -> dict[str, object]:
    fields = dataclasses.asdict(namespace)
    del fields["tenant_salt"]
    layout = fields.pop("layout")
    return fields | {f"layout.{name}": value for name, value in layout.items()}


def _print(
    reports: Sequence[BlockReport], first: int | None, elsewhere: Sequence[Elsewhere], *, of: int
) -> None:
    stored = len(reports) if first is None else first
    print(f"{stored} of {of} blocks are stored as a prefix")
    shown = reports if first is None else reports[: first + 1]
    if len(shown) > _SHOWN_BLOCKS:
        print(f"  ... {len(shown) - _SHOWN_BLOCKS} blocks before these")
    for report in shown[-_SHOWN_BLOCKS:]:
        print(f"  block {report.index}: {_told(report)}")
    behind = [] if first is None else reports[first + 1 :]
    if behind:
        num_stored = sum(bool(report.tiers) for report in behind)
        print(f"  {len(behind)} blocks behind it cannot be used; {num_stored} of them are stored")
    for hit in elsewhere:
        differs = hit["differs"]
        assert isinstance(differs, dict)
        what = ", ".join(
            f"{name} {ours!r} here, {theirs!r} there" for name, (ours, theirs) in differs.items()
        )
        print(f"  the same tokens have {hit['blocks']} blocks under another namespace: {what}")


def _told(report: BlockReport) -> str:
    if report.reason is None:
        return f"stored in {', '.join(report.tiers)}{', leased' if report.is_leased else ''}"
    text = f"not served: {report.reason.value}"
    if report.gone_s is not None:
        text += f", gone from {report.gone_tier} {report.gone_s:.1f} s ago"
    if report.pressed_by:
        text += f", for room for namespace {report.pressed_by}"
    if report.siblings:
        text += f"; {report.siblings} other blocks follow the same prefix: another prompt went on differently"
    return text
