"""Attention problems of random shape, and how close a result must come."""

from dataclasses import dataclass

import torch

from kvstore_kernels.tensors import FP8_DTYPES


@dataclass(frozen=True)
class Case:
    """Arguments of one attention call, on one device."""

    q: torch.Tensor
    kv_pages: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    kv_scales: torch.Tensor | None

    def to(self, device: torch.device) -> "Case":
        return Case(*(None if t is None else t.to(device) for t in vars(self).values()))  # type: ignore[arg-type]  # checked by the field's own None


@dataclass(frozen=True)
class Shape:
    """What a case is made of: queries and cached tokens of each sequence, and the sizes of the model."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    block_tokens: int
    kv_heads: int
    group: int


def make_case(shape: Shape, dtypes: tuple[torch.dtype, torch.dtype, int], generator: torch.Generator) -> Case:
    """A case whose blocks lie in any order among pages of other owners, which hold NaN."""
    query_dtype, kv_dtype, head_dim = dtypes
    blocks = [-(-context // shape.block_tokens) for context in shape.contexts]
    width = max([*blocks, 1])
    pages = sum(blocks) + 2
    order = torch.randperm(pages, generator=generator)
    block_tables = torch.full((len(blocks), width), 2**30, dtype=torch.int32)  # never to be read
    pool = torch.full((pages, 3, 2, shape.block_tokens, shape.kv_heads, head_dim), torch.nan)
    taken = 0
    for row, count in enumerate(blocks):
        slots = order[taken : taken + count]
        taken += count
        block_tables[row, :count] = slots.int()
        rows = torch.randn(2, count * shape.block_tokens, shape.kv_heads, head_dim, generator=generator)
        # What lies behind the last token of a sequence may be anything.
        rows[:, shape.contexts[row] :] = torch.nan
        split = rows.view(2, count, shape.block_tokens, shape.kv_heads, head_dim)
        pool[slots, 1] = split.transpose(0, 1)
    scales = None
    if kv_dtype in FP8_DTYPES:
        scales = torch.rand(2, shape.kv_heads, generator=generator) + 0.5
    heads = shape.kv_heads * shape.group
    # As views of a fused projection, whose token stride is larger than a row.
    q = (torch.randn(sum(shape.queries), heads + 2, head_dim, generator=generator) * 2).to(query_dtype)
    return Case(
        q[:, :heads],
        pool.to(kv_dtype)[:, 1],
        block_tables,
        torch.tensor([0, *shape.queries]).cumsum(0).int(),
        torch.tensor(shape.contexts, dtype=torch.int32),
        scales,
    )


def tolerance(case: Case) -> float:
    """Largest error that rounding explains.

    A weight is rounded to the 16-bit type before it meets values, an error of at most half a unit in the last
    place of each, so of that share of the largest value; and the result is rounded once more. With fp8 pages
    that type is float16 for weights and the dtype of the queries for the result. Scores are sums of exact
    products in float32: their error, of some 1e-5, moves a weight by as much.
    """
    values = case.kv_pages[:, 1].float()
    largest = values[~values.isnan()].abs().max().item() if (~values.isnan()).any() else 0.0
    if case.kv_scales is not None:
        largest *= case.kv_scales[1].max().item()
    inner = torch.float16 if case.kv_scales is not None else case.q.dtype
    units = torch.finfo(inner).eps / 2 + torch.finfo(case.q.dtype).eps / 2
    return largest * (units + 5e-5)
