"""Copy with checksum out of a memfd, as an arena is one, in steps of several sizes, beside the plain copy.

Either side is summed. GB/s, medians of interleaved runs over a set that is larger than the caches.
"""

import argparse
import json
import mmap
import os
import statistics
import time

import numpy as np
import numpy.typing as npt

from kvstore.checksum import copy_with_checksum, copy_with_source_checksum

STEPS_BYTES = [1 << shift for shift in range(14, 22)]


def shared_copy(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the same blocks in memory of a memfd."""
    fd = os.memfd_create("copy-checksum")
    os.posix_fallocate(fd, 0, blocks.nbytes)
    mapping = mmap.mmap(fd, blocks.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(fd)
    shared = np.frombuffer(mapping, np.uint8).reshape(blocks.shape)
    np.copyto(shared, blocks)
    return shared


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = np.random.default_rng(1).integers(0, 256, (args.blocks, args.block_bytes), np.uint8)
    source = shared_copy(target)
    figures: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for step_bytes in STEPS_BYTES:
            started_s = time.perf_counter()
            for to, origin in zip(target, source, strict=True):
                copy_with_checksum(to, origin, step_bytes=step_bytes)
            figures.setdefault(str(step_bytes), []).append(source.nbytes / (time.perf_counter() - started_s))
        started_s = time.perf_counter()
        for to, origin in zip(target, source, strict=True):
            copy_with_source_checksum(to, origin)
        figures.setdefault("source", []).append(source.nbytes / (time.perf_counter() - started_s))
        started_s = time.perf_counter()
        for to, origin in zip(target, source, strict=True):
            np.copyto(to, origin)
        figures.setdefault("copy", []).append(source.nbytes / (time.perf_counter() - started_s))
    medians = {step: round(statistics.median(values) / 1e9, 2) for step, values in figures.items()}
    for step, gb_per_s in medians.items():
        print(f"{step:>10}  {gb_per_s:6.2f} GB/s")
    if args.json:
        print(json.dumps({"block_bytes": args.block_bytes, "gb_per_s": medians}))


if __name__ == "__main__":
    main()
