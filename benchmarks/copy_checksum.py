"""Copy with checksum out of and into a memfd, as an arena is one, beside the plain copy.

steps   in steps of several sizes, with the destination (out) or the source (in) summed
copies  how the bytes are copied: by the C library (numpy.copyto of bytes) or by NumPy's loop over words, from
        a slot to buffers that begin so many bytes behind a page of 4 KiB

GB/s, medians of interleaved runs over a set that is larger than the caches.
"""

import argparse
import functools
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.arena_mapping import map_file, use_huge_pages
from kvstore.checksum import copy_bytes, copy_with_checksum, copy_with_source_checksum

STEPS_BYTES = [1 << shift for shift in range(16, 22)]
SIZES_BYTES = [64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20]
BEHIND_BYTES = [0, 16, 64, 1024]
"""NumPy's large arrays begin 16 bytes behind a page, torch's 64."""

_PAGE_BYTES = mmap.PAGESIZE

Array = npt.NDArray[np.uint8]
Copy = Callable[[Array, Array], object]


def shared_blocks(num_blocks: int, block_bytes: int) -> Array:
    """Return random blocks in memory of a memfd, in huge pages where the kernel has them."""
    size_bytes = num_blocks * block_bytes
    fd = os.memfd_create("copy-checksum")
    os.posix_fallocate(fd, 0, size_bytes)
    use_huge_pages(fd, size_bytes)
    mapping, start = map_file(fd, size_bytes, is_writable=True, is_prefaulted=True)
    os.close(fd)
    shared = np.frombuffer(mapping, np.uint8)[start : start + size_bytes]
    shared[:] = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    return shared.reshape(num_blocks, block_bytes)


def private_blocks(num_blocks: int, block_bytes: int, behind_bytes: int) -> list[Array]:
    """Return buffers that begin so many bytes behind a page."""
    room = np.zeros(num_blocks * (block_bytes + 2 * _PAGE_BYTES), np.uint8)
    room.fill(1)  # zeros alone are not yet memory
    stride = -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES
    first = -room.ctypes.data % _PAGE_BYTES + behind_bytes
    return [room[first + at * stride :][:block_bytes] for at in range(num_blocks)]


class Run:
    """Ways to copy all blocks, timed in turn."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._ways: dict[str, tuple[Copy, list[Array], list[Array]]] = {}

    def add(self, name: str, copy: Copy, targets: list[Array], origins: list[Array]) -> None:
        """Add a way: ``copy(target, origin)`` for each block."""
        self._ways[name] = copy, targets, origins

    def gb_per_s(self) -> dict[str, float]:
        """Return the median of each."""
        seconds: dict[str, list[float]] = {name: [] for name in self._ways}
        for _ in range(self._rounds):
            for name, (copy, targets, origins) in self._ways.items():
                started_s = time.perf_counter()
                for target, origin in zip(targets, origins, strict=True):
                    copy(target, origin)
                seconds[name].append(time.perf_counter() - started_s)
        size_bytes = {name: sum(map(len, targets)) for name, (_, targets, _) in self._ways.items()}
        return {
            name: round(size_bytes[name] / statistics.median(times) / 1e9, 2)
            for name, times in seconds.items()
        }


def measure_steps(args: argparse.Namespace) -> dict[str, float]:
    """Copy and sum in steps of several sizes."""
    run, shared = Run(args.rounds), [*shared_blocks(args.blocks, args.block_bytes)]
    private = private_blocks(args.blocks, args.block_bytes, 16)
    run.add("copy", np.copyto, private, shared)
    for step_bytes in STEPS_BYTES:
        out = functools.partial(copy_with_checksum, step_bytes=step_bytes)
        into = functools.partial(copy_with_source_checksum, step_bytes=step_bytes)
        run.add(f"out in steps of {step_bytes >> 10} KiB", out, private, shared)
        run.add(f"in in steps of {step_bytes >> 10} KiB", into, shared, private)
    return run.gb_per_s()


def measure_copies(args: argparse.Namespace) -> dict[str, float]:
    """Copy in both ways, out of slots into buffers here and there in a page."""
    run = Run(args.rounds)
    for block_bytes in SIZES_BYTES:
        num_blocks = max(1, args.blocks * args.block_bytes // block_bytes)
        shared = [*shared_blocks(num_blocks, block_bytes)]
        for behind_bytes in BEHIND_BYTES:
            private = private_blocks(num_blocks, block_bytes, behind_bytes)
            what = f"{block_bytes >> 10} KiB to {behind_bytes} behind"
            run.add(f"{what}, bytes", np.copyto, private, shared)
            run.add(f"{what}, words", copy_bytes, private, shared)
    return run.gb_per_s()


def main() -> None:
    """Print tables, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tables = {"steps": measure_steps(args), "copies": measure_copies(args)}
    for name, table in tables.items():
        print(name)
        for way, gb_per_s in table.items():
            print(f"  {way:<32} {gb_per_s:6.2f} GB/s")
    if args.json:
        print(json.dumps({"block_bytes": args.block_bytes, "gb_per_s": tables}))


if __name__ == "__main__":
    main()
