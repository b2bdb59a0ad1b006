"""What a replay says: a table for people, and plain values for JSON."""

from collections.abc import Mapping, Sequence

from kvstore.replay.lru_curve import LruCurve
from kvstore.replay.outcome import Prices, ReplayResult
from kvstore.replay.trace import Trace

_SHARES = (0.5, 0.9, 0.99)
"""Shares of LRU's hits for which a size is told."""


def as_dict(
    trace: Trace, results: Sequence[ReplayResult], prices: Prices, *, lru: LruCurve | None = None
) -> dict[str, object]:
    """Return everything for one JSON object."""
    values: dict[str, object] = {
        "trace": trace.source,
        "format": trace.format,
        "block_tokens": trace.block_tokens,
        "requests": trace.requests,
        "block_accesses": trace.block_accesses,
        "unique_blocks": trace.unique_blocks,
        "input_tokens": trace.total_input_tokens,
        "notes": list(trace.notes),
        "results": [_result_dict(result, prices) for result in results],
    }
    if lru is not None:
        values["lru_curve"] = [_point(lru, capacity) for capacity in lru.capacities()]
        values["lru_sizes"] = {f"{share:.0%}": lru.capacity_for(share) for share in _SHARES}
    return values


def _point(lru: LruCurve, capacity_blocks: int) -> dict[str, int]:
    hit_blocks, hit_tokens = lru.at(capacity_blocks)
    return {"capacity_blocks": capacity_blocks, "hit_blocks": hit_blocks, "hit_tokens": hit_tokens}


def _result_dict(result: ReplayResult, prices: Prices) -> dict[str, object]:
    values: dict[str, object] = {
        "policy": result.policy,
        "capacity_blocks": result.capacity_blocks,
        "requests": result.requests,
        "block_accesses": result.block_accesses,
        "hit_blocks": result.hit_blocks,
        "hit_tokens": result.hit_tokens,
        "written_blocks": result.written_blocks,
        "seconds": round(result.seconds, 4),
        "block_hit_ratio": round(result.block_hit_ratio, 6),
        "token_hit_ratio": round(result.token_hit_ratio, 6),
        "share_of_bound": round(result.share_of_bound, 6),
        "bound_hit_blocks": result.bound_blocks,
    }
    values |= _priced(result.written_blocks, result.hit_tokens, prices)
    if result.tiers:
        values["tiers"] = [
            {
                "tier": tier.tier,
                "capacity_blocks": tier.capacity_blocks,
                "hit_blocks": tier.hit_blocks,
                "written_blocks": tier.written_blocks,
                **(
                    {}
                    if prices.block_bytes is None
                    else {"written_bytes": prices.written_bytes(tier.written_blocks)}
                ),
            }
            for tier in result.tiers
        ]
    return values


def _priced(written_blocks: int, hit_tokens: int, prices: Prices) -> Mapping[str, object]:
    values: dict[str, object] = {}
    if prices.block_bytes is not None:
        values["written_bytes"] = prices.written_bytes(written_blocks)
    if (saved_s := prices.prefill_s(hit_tokens)) is not None:
        values["prefill_saved_s"] = round(saved_s, 3)
    return values


def table(trace: Trace, results: Sequence[ReplayResult], prices: Prices) -> str:
    """Return a table of the results under a line about the trace."""
    columns = ["policy", "blocks", "hit blocks", "hit tokens", "of bound", "written"]
    if prices.block_bytes is not None:
        columns.append("written bytes")
    if prices.prefill_tokens_per_s is not None:
        columns.append("prefill saved")
    columns += [tier.tier for tier in results[0].tiers] if results else []
    columns.append("seconds")
    rows = [_row(result, prices) for result in results]
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    lines = [
        "  ".join(_aligned(cell, width, at) for at, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in [columns, ["-" * width for width in widths], *rows]
    ]
    head = (
        f"{trace.source} ({trace.format}): {trace.requests} requests, {trace.block_accesses} block accesses,"
        f" {trace.unique_blocks} blocks of {trace.block_tokens} tokens"
    )
    return "\n".join([head, *(f"note: {note}" for note in trace.notes), "", *map(str.rstrip, lines)])


def sizing(lru: LruCurve, prices: Prices) -> str:
    """Say in one line how many blocks LRU needs for some shares of all that it could hit."""
    sizes = []
    for share in _SHARES:
        blocks = lru.capacity_for(share)
        num_bytes = prices.written_bytes(blocks)
        sizes.append(f"{share:.0%} with {blocks}" + ("" if num_bytes is None else f" ({_size(num_bytes)})"))
    return f"lru: of {lru.hit_blocks[-1]} hits that it has at any size, {', '.join(sizes)} blocks"


def _row(result: ReplayResult, prices: Prices) -> list[str]:
    row = [
        result.policy,
        str(result.capacity_blocks),
        f"{result.block_hit_ratio:.2%}",
        f"{result.token_hit_ratio:.2%}",
        f"{result.share_of_bound:.1%}",
        str(result.written_blocks),
    ]
    if (written := prices.written_bytes(result.written_blocks)) is not None:
        row.append(_size(written))
    if (saved_s := prices.prefill_s(result.hit_tokens)) is not None:
        row.append(f"{saved_s:.1f} s")
    row += [
        f"{tier.hit_blocks / max(result.block_accesses, 1):.2%}, {tier.written_blocks} written"
        for tier in result.tiers
    ]
    return [*row, f"{result.seconds:.2f}"]


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
