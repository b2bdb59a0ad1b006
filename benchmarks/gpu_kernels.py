"""The CUDA kernels on a GPU: each checked against float64, timed, and set beside what the device can do.

Two ceilings are measured first: how fast torch copies device memory, and how fast it multiplies bfloat16
matrices. Kernels bound by memory (decode, gather, scatter, write) are given as a share of the first;
prefill as a share of torch's fused attention on contiguous data, and of the second. Times are medians over
CUDA events; data is larger than the L2 cache and rotates through layers. JSON on the last line. Status 3
without a CUDA device, 1 if a result is wrong, 0 otherwise: a missed aim is reported, not an error.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional

from kvstore_kernels import KernelsUnavailable, PagedKernels, open_kernels, plan_splits, reference

BLOCK_TOKENS = 16
LAYERS = 2
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
AIMS = {"decode": 0.85, "gather": 0.9, "scatter": 0.9, "prefill": 0.5}


@dataclass(frozen=True)
class Model:
    """Heads of a model."""

    heads: int
    kv_heads: int
    head_dim: int


LLAMA_8B = Model(32, 8, 128)
SMOLLM = Model(9, 3, 64)
GEMMA = Model(16, 8, 256)


@dataclass(frozen=True)
class Row:
    """One measured kernel.

    Attributes:
        name: what was run.
        time_us: median time.
        rate: TB/s of memory, or TFLOP/s.
        share: of the ceiling that counts for it.
        aim: share to reach, if there is one.
        error: largest difference from float64, in units of the largest value.
        is_right: whether that is within what rounding explains.
    """

    name: str
    time_us: float
    rate: float
    share: float
    aim: float | None
    error: float
    is_right: bool


Timer = Callable[[Callable[[int], object]], float]
"""Gives the median time in microseconds of ``work(i)``, for i in turn."""


def device_time_us(work: Callable[[int], object], rounds: int) -> float:
    """Median time of ``work(i)`` on the device, for i in turn."""
    for i in range(3):
        work(i)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    for i, (start, stop) in enumerate(events):
        start.record()
        work(i)
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) * 1e3 for start, stop in events)


class Bench:
    """Kernels and ceilings of one device, and what was measured on it."""

    def __init__(self, kernels: PagedKernels, device: torch.device, time_us: Timer, places: int) -> None:
        self.kernels = kernels
        self.device = device
        self.time_us = time_us
        self.places = places
        self.generator = torch.Generator(device).manual_seed(1)
        self.rows: list[Row] = []
        self.copy_tb_s = 0.0
        self.matmul_tflop_s = 0.0

    def measure_ceilings(self, copy_bytes: int, matmul_size: int) -> None:
        """TB/s read and written by torch's copy; TFLOP/s of its product of two square bfloat16 matrices."""
        source = torch.empty(copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.copy_tb_s = 2 * copy_bytes / self.time_us(lambda _: target.copy_(source)) / 1e6
        shape = (2, matmul_size, matmul_size)
        a, b = torch.randn(shape, device=self.device, generator=self.generator).to(BF16)
        self.matmul_tflop_s = 2 * matmul_size**3 / self.time_us(lambda _: a @ b) / 1e6

    def pages(self, model: Model, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Random pages of all layers for this many tokens."""
        shape = (-(-tokens // BLOCK_TOKENS), LAYERS, 2, BLOCK_TOKENS, model.kv_heads, model.head_dim)
        pool = torch.empty(shape, dtype=dtype, device=self.device)
        for page in pool.split(4096):
            page.copy_(torch.randn(page.shape, device=self.device, generator=self.generator))
        return pool

    def tables(self, context_lens: list[int]) -> torch.Tensor:
        """Block tables whose blocks lie anywhere."""
        blocks = [-(-length // BLOCK_TOKENS) for length in context_lens]
        order = torch.randperm(sum(blocks), device=self.device, generator=self.generator).int()
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=self.device)
        taken = 0
        for row, count in enumerate(blocks):
            tables[row, :count] = order[taken : taken + count]
            taken += count
        return tables

    def scales(self, model: Model, dtype: torch.dtype) -> torch.Tensor | None:
        """Scales of fp8 pages."""
        if dtype != E4M3:
            return None
        return torch.rand(2, model.kv_heads, device=self.device, generator=self.generator) + 0.5

    def queries(self, model: Model, tokens: int) -> torch.Tensor:
        """Random queries."""
        shape = (tokens, model.heads, model.head_dim)
        return torch.randn(shape, device=self.device, generator=self.generator).to(BF16)

    def add(
        self, kind: str, name: str, us: float, share: float, rate: float, error: tuple[float, bool]
    ) -> None:
        """Note a result and print its line."""
        row = Row(f"{kind} {name}", us, rate, share, AIMS.get(kind), *error)
        self.rows.append(row)
        aim = "" if row.aim is None else f" (aim {row.aim}{'' if share >= row.aim else ', missed'})"
        right = "" if row.is_right else "  WRONG"
        figures = f"{us:10.1f} us {rate:8.3f} {share:7.3f}{aim}  error {row.error:.1e}{right}"
        print(f"{row.name:42} {figures}", flush=True)


def compared(
    out: torch.Tensor, meant: torch.Tensor, largest: float, dtype: torch.dtype
) -> tuple[float, bool]:
    """Error in units of the largest value, and whether rounding weights and result explains it."""
    error = (out.double() - meant.double()).abs().max().item() / largest
    inner = torch.finfo(torch.float16 if dtype == E4M3 else BF16).eps / 2
    return error, error <= inner + torch.finfo(BF16).eps / 2 + 5e-5


def largest_value(pages: torch.Tensor, scales: torch.Tensor | None) -> float:
    """Largest value in the pages, with the largest scale."""
    found = max(part[:, 1].float().abs().max().item() for part in pages.split(4096))
    return found if scales is None else found * scales[1].max().item()


def decode(bench: Bench, model: Model, context_lens: list[int], dtype: torch.dtype) -> None:
    """One decode step of one layer: bytes of keys and values read, against the copy."""
    pool = bench.pages(model, sum(-(-n // BLOCK_TOKENS) * BLOCK_TOKENS for n in context_lens), dtype)
    tables, scales = bench.tables(context_lens), bench.scales(model, dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=bench.device)
    q = bench.queries(model, len(context_lens))
    plan = plan_splits(context_lens, rows=model.kv_heads, places=bench.places)

    def step(i: int) -> torch.Tensor:
        pages = pool[:, i % LAYERS]
        return bench.kernels.paged_decode(q, pages, tables, lens, kv_scales=scales, plan=plan)

    few = slice(0, 2)
    out = step(0)[few]
    meant = reference.paged_decode(
        *(q[few], pool[:, 0], tables[few], lens[few]), kv_scales=scales, compute_dtype=torch.float64
    )
    error = compared(out, meant, largest_value(pool[:, 0], scales), dtype)
    us = bench.time_us(step)
    rate = 2 * sum(context_lens) * model.kv_heads * model.head_dim * dtype.itemsize / us / 1e6
    name = f"{len(context_lens)} x {max(context_lens)} {model.heads}/{model.kv_heads}/{model.head_dim}"
    bench.add("decode", f"{name} {str(dtype)[6:]}", us, rate / bench.copy_tb_s, rate, error)


def prefill(bench: Bench, model: Model, new: int, cached: int, dtype: torch.dtype) -> None:
    """A chunk of new tokens over cached ones, against torch's fused attention on contiguous data."""
    context = cached + new
    pool = bench.pages(model, context, dtype)
    tables, scales = bench.tables([context]), bench.scales(model, dtype)
    lens = torch.tensor([context], dtype=torch.int32, device=bench.device)
    starts = torch.tensor([0, new], dtype=torch.int32, device=bench.device)
    q = bench.queries(model, new)

    def step(i: int) -> torch.Tensor:
        return bench.kernels.paged_prefill(q, pool[:, i % LAYERS], tables, starts, lens, kv_scales=scales)

    # The last rows see the whole context; as decode steps they need little memory in float64.
    last = 4
    meant = torch.cat(
        [
            reference.paged_decode(
                *(q[new - i - 1 : new - i], pool[:, 0], tables, lens - i),
                kv_scales=scales,
                compute_dtype=torch.float64,
            )
            for i in reversed(range(last))
        ]
    )
    error = compared(step(0)[-last:], meant, largest_value(pool[:, 0], scales), dtype)
    us = bench.time_us(step)
    flop = 4 * model.heads * model.head_dim * (new * cached + new * (new + 1) / 2)
    rate, fused = flop / us / 1e6, fused_rate(bench, model, context)
    name = f"{new} over {cached} {model.heads}/{model.kv_heads}/{model.head_dim} {str(dtype)[6:]}"
    bench.add("prefill", name, us, rate / fused, rate, error)
    product = rate / bench.matmul_tflop_s
    print(f"{'':42} torch: {fused:.1f} TFLOP/s; {product:.3f} of the matrix product's rate")


def fused_rate(bench: Bench, model: Model, tokens: int) -> float:
    """TFLOP/s of torch's fused causal attention over one contiguous sequence."""
    shape = (1, model.heads, tokens, model.head_dim)
    q, k, v = (torch.randn(shape, device=bench.device, generator=bench.generator).to(BF16) for _ in range(3))
    us = bench.time_us(lambda _: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return 2 * model.heads * model.head_dim * tokens * (tokens + 1) / us / 1e6


def moves(bench: Bench, model: Model, blocks: int) -> None:
    """Gather and scatter of blocks with all layers, and of one layer; writing new rows."""
    pool = bench.pages(model, 2 * blocks * BLOCK_TOKENS, BF16)
    slots = torch.randperm(2 * blocks, device=bench.device, generator=bench.generator)[:blocks]
    out = torch.empty(blocks, *pool.shape[1:], dtype=BF16, device=bench.device)
    kernels = bench.kernels

    def measure(
        kind: str, name: str, work: Callable[[int], object], moved_bytes: int, is_right: bool
    ) -> None:
        us = bench.time_us(work)
        rate = moved_bytes / us / 1e6
        bench.add(kind, name, us, rate / bench.copy_tb_s, rate, (0.0 if is_right else 1.0, is_right))

    kernels.gather_blocks(pool, slots, out)
    is_gathered = torch.equal(out, pool[slots])
    other = torch.zeros_like(pool)
    kernels.scatter_blocks(out, other, slots)
    is_scattered = torch.equal(other[slots], pool[slots])
    whole = 2 * out.numel() * 2
    measure("gather", "all layers", lambda _: kernels.gather_blocks(pool, slots, out), whole, is_gathered)
    measure("scatter", "all layers", lambda _: kernels.scatter_blocks(out, other, slots), whole, is_scattered)

    def one(i: int) -> None:
        layer = slice(i % LAYERS, i % LAYERS + 1)
        kernels.gather_blocks(pool[:, layer], slots, out[:, layer])

    measure("gather", "one layer", one, whole // LAYERS, is_gathered)
    small = torch.empty(out.shape, dtype=E4M3, device=bench.device)
    scales = torch.rand(LAYERS, 2, model.kv_heads, device=bench.device, generator=bench.generator) + 0.5
    meant = torch.empty_like(small)
    kernels.gather_blocks(pool, slots, small, kv_scales=scales)
    reference.gather_blocks(pool, slots, meant, kv_scales=scales)
    is_quantised = torch.equal(small.view(torch.uint8), meant.view(torch.uint8))
    measure(
        *("gather", "all layers to fp8"),
        lambda _: kernels.gather_blocks(pool, slots, small, kv_scales=scales),
        *(out.numel() * 3, is_quantised),
    )


def write(bench: Bench, model: Model, tokens: int) -> None:
    """Writing new keys and values of one layer."""
    pool = bench.pages(model, tokens, BF16)
    k, v = (bench.queries(Model(model.kv_heads, model.kv_heads, model.head_dim), tokens) for _ in range(2))
    slots = torch.randperm(tokens, device=bench.device, generator=bench.generator)
    meant = pool.clone()
    bench.kernels.write_kv(k, v, pool[:, 0], slots)
    reference.write_kv(k, v, meant[:, 0], slots)
    is_right = torch.equal(pool, meant)
    us = bench.time_us(lambda i: bench.kernels.write_kv(k, v, pool[:, i % LAYERS], slots))
    rate = 4 * k.numel() * 2 / us / 1e6
    bench.add("write", f"{tokens} tokens", us, rate / bench.copy_tb_s, rate, (0.0, is_right))


def run_all(bench: Bench) -> None:
    """Every case."""
    moves(bench, LLAMA_8B, 4096)
    write(bench, LLAMA_8B, 65_536)
    for dtype in (BF16, E4M3):
        decode(bench, LLAMA_8B, [8192] * 64, dtype)
        decode(bench, LLAMA_8B, [131_072], dtype)
        decode(bench, LLAMA_8B, [2048] * 256, dtype)
        decode(bench, LLAMA_8B, [100_000] + [1000 + 37 * i for i in range(63)], dtype)
        decode(bench, SMOLLM, [8192] * 128, dtype)
        decode(bench, GEMMA, [8192] * 32, dtype)
        prefill(bench, LLAMA_8B, 8192, 0, dtype)
        prefill(bench, LLAMA_8B, 2048, 30_720, dtype)
        prefill(bench, LLAMA_8B, 256, 32_512, dtype)
        prefill(bench, SMOLLM, 8192, 0, dtype)
        prefill(bench, GEMMA, 8192, 0, dtype)


def main() -> int:
    """Measure, print a table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--flashinfer", action="store_true", help="attend by FlashInfer where it is installed"
    )
    parser.add_argument("--cache-dir", type=Path, help="folder for compiled kernels")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels: no CUDA device (or a torch without CUDA): nothing was measured", file=sys.stderr)
        return 3
    try:
        kernels = open_kernels(
            torch.device("cuda"), cache_dir=args.cache_dir, prefers_flashinfer=args.flashinfer
        )
    except KernelsUnavailable as error:
        print(f"gpu_kernels: {error}", file=sys.stderr)
        return 3
    places = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    timer = functools.partial(device_time_us, rounds=args.rounds)
    bench = Bench(kernels, torch.device("cuda"), timer, places)
    bench.measure_ceilings(copy_bytes=2 << 30, matmul_size=8192)
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {bench.copy_tb_s:.2f} TB/s, matrix product {bench.matmul_tflop_s:.0f} TFLOP/s")
    print(f"{'':42} {'time':>13} {'TB/s or TFLOP/s'} share of the ceiling")
    run_all(bench)
    ceilings = {"copy_tb_s": bench.copy_tb_s, "matmul_tflop_s": bench.matmul_tflop_s}
    print(json.dumps({"device": name, **ceilings, "rows": [asdict(row) for row in bench.rows]}))
    return 0 if all(row.is_right for row in bench.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
