"""This store: ``kvstore serve`` in a process of its own, reached through KVStore."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace, PrefixChain, direct_reads
from kvstore import fetch_calls as plans
from kvstore.keys import BlockKey
from kvstore.transfer import ReadEnd, read_slots
from peers import Bytes
from served_store import ServedStore

_BLOCK_TOKENS = 16


class OwnStore:
    """One server and one blocking client."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int, *, ssd_bytes: int = 0) -> None:
        room = num_blocks * (-(-block_bytes // 4096) * 4096) * 5 // 4 + (4 << 20)
        self._server = ServedStore(folder, room, ssd_bytes=ssd_bytes)
        self.server_pids = [self._server.pid]
        self.client = KVStore.connect(self._server.socket_path, timeout_s=10)
        layout = KVLayout.opaque(block_bytes=block_bytes, block_tokens=_BLOCK_TOKENS)
        self.namespace = Namespace(f"bench-{block_bytes}", layout)
        self.client.open_namespace(self.namespace)
        self._digest = self.namespace.digest

    @property
    def address(self) -> str:
        """Where other clients reach it."""
        return str(self._server.socket_path)

    def names(self, keys: Sequence[bytes]) -> PrefixChain:
        """The keys as a chain from the start of a sequence."""
        return PrefixChain(self._digest, tuple(BlockKey(key) for key in keys), _BLOCK_TOKENS)

    def put(self, names: PrefixChain, payloads: Sequence[Bytes]) -> None:
        """Reserve, copy with checksum, commit."""
        stored = self.client.put(names, payloads)
        assert stored.stored == len(payloads), stored

    def fetch(self, names: PrefixChain, targets: Sequence[Bytes]) -> None:
        """Copy and check what is found in shared memory, or lease, copy, check, release."""
        result = self.client.fetch_into(names, targets)
        assert result.blocks == len(targets), result

    def fetch_unchecked(self, names: PrefixChain, targets: Sequence[Bytes]) -> None:
        """As ``fetch`` but believing what was copied: only to know the price of the checks."""
        checked, blocks = read_slots, 0

        def read(arena, slots, buffers, should_stop):  # type: ignore[no-untyped-def]  # see read_slots
            nonlocal blocks
            for slot, buffer in zip(slots, buffers, strict=True):
                np.copyto(buffer, arena.slot_array(slot[0], len(buffer)))
            blocks += len(slots)
            return len(slots), ReadEnd.ALL

        plans.read_slots = direct_reads.read_slots = read
        try:
            self.fetch(names, targets)
        finally:
            plans.read_slots = direct_reads.read_slots = checked
        assert blocks == len(targets), "the client reads slots in another way"

    def view(self, names: PrefixChain) -> None:
        """Lease, check in place, look at one byte of each, release: no payload is copied."""
        with self.client.lease(names) as lease:
            views = self.client.view(lease)
            assert len(views) == len(names)
            assert all(view[0] >= 0 for view in views)

    def exists(self, names: PrefixChain) -> None:
        """Ask which blocks are stored."""
        assert all(self.client.exists(names))

    def match(self, names: PrefixChain) -> None:
        """Count the leading blocks that are stored."""
        assert self.client.match(names).blocks == len(names)

    def remove(self, names: PrefixChain) -> None:
        """Drop the blocks."""
        self.client.drop(names)

    def close(self) -> None:
        """Stop client and server."""
        self.client.close()
        self._server.close()


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> OwnStore:
    """Start it."""
    return OwnStore(folder, block_bytes, num_blocks)
