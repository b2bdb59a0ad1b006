"""Payloads in memory, in groups of one request each."""

import os
from dataclasses import dataclass

import numpy as np

from peers import Bytes, Names, Peer

MAX_GROUPS = 512


@dataclass
class Shape:
    """Blocks of one size in groups of one request each, with payloads and places to fetch them into."""

    block_bytes: int
    keys: list[bytes]
    sources: list[list[Bytes]]
    targets: list[list[Bytes]]

    @classmethod
    def make(cls, block_bytes: int, batch: int, set_bytes: int) -> "Shape":
        """Make random payloads of about ``set_bytes``; every group has memory of its own."""
        groups = max(2, min(MAX_GROUPS, set_bytes // (block_bytes * batch)))
        count = groups * batch
        source = np.random.default_rng(block_bytes).integers(0, 256, (count, block_bytes), np.uint8)
        target = np.zeros_like(source)
        target.fill(0)  # zeros alone are not yet memory
        cut = [slice(start, start + batch) for start in range(0, count, batch)]
        keys = [os.urandom(32) for _ in range(count)]
        return cls(block_bytes, keys, [[*source[at]] for at in cut], [[*target[at]] for at in cut])

    def names(self, peer: Peer) -> list[Names]:
        """The keys of each group, as the peer wants them."""
        batch = len(self.sources[0])
        return [peer.names(self.keys[at : at + batch]) for at in range(0, len(self.keys), batch)]

    def check(self) -> None:
        """Fail unless every payload arrived; wipes a little of each."""
        for source, target in zip(self.sources, self.targets, strict=True):
            for sent, got in zip(source, target, strict=True):
                assert np.array_equal(sent, got), "a fetched block has other bytes"
                got[:64] = 0
