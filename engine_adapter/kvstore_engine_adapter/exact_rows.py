"""Finding the numbers of rows for which a computation gives each row the same bits, whatever its company.

A matrix product may use another kernel, or sum in another order, for another number of rows. A server that
batches requests runs a row among any others, so it must know for which numbers of rows that changes nothing.

Random numbers are poor witnesses: sums in another order differ in their last float32 bits, which rounding to
bfloat16 hides but for one result in ten thousand (measured: 1536 inputs, one row against many). So products
are tried on rows whose terms cancel: what is left of the sum is its rounding errors, and nearly every result
shows another order.
"""

import logging
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)

_SHIFTS = (0, 1, 37)


def exact_row_counts(
    compute: Callable[[torch.Tensor], torch.Tensor], num_samples: int, candidates: Sequence[int]
) -> list[int]:
    """Return those candidates whose rows have the bits of ``num_samples`` rows computed together.

    ``compute`` takes indices ``[rows]`` of sample rows and returns the results of computing those rows
    together. Each candidate is tried with the samples in several places. None is exact if already the bits of
    the samples depend on their places.
    """
    wanted = compute(torch.arange(num_samples))

    def is_exact(count: int) -> bool:
        indices = [(torch.arange(count) + shift) % num_samples for shift in _SHIFTS]
        return all(torch.equal(compute(index), wanted[index]) for index in indices)

    return [count for count in candidates if is_exact(count)] if is_exact(num_samples) else []


def cancelling_product(
    rows: int, matrix: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[rows, in]`` and a matrix ``[out, in]`` like the given one, whose exact product is zero."""
    outputs, inputs = matrix.shape
    half = inputs // 2
    signs, weights = (torch.randn(count, half, generator=generator) for count in (rows, outputs))
    order = torch.randperm(2 * half, generator=generator)
    left = torch.zeros(rows, inputs)
    right = torch.zeros(outputs, inputs)
    left[:, : 2 * half] = torch.cat([signs, -signs], dim=1)[:, order]
    right[:, : 2 * half] = torch.cat([weights, weights], dim=1)[:, order] * inputs**-0.5
    return left.to(matrix), right.to(matrix)


def candidate_row_counts(limit: int) -> list[int]:
    """Return row counts to try, up to the first that is at least ``limit``.

    Their distance grows with them: at most an eighth is padding from 64 rows on.
    """
    counts = [1, 2, 4]
    while counts[-1] < limit:
        step = max(4, 2 ** (counts[-1].bit_length() - 4))
        counts.append(counts[-1] + step)
    return counts


def rung_of(ladder: Sequence[int], count: int) -> int:
    """Return the least number of rows on a ladder that is at least ``count``."""
    return next(rung for rung in ladder if rung >= count)
