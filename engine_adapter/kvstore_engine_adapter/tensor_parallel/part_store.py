"""PartStore: a follower's client of the store, for its part of each block."""

import time
from collections.abc import Callable

from kvstore.errors import ProtocolMismatch
from kvstore.keys import BlockKey, Namespace, NamespaceDigest
from kvstore.layout import KVLayout, Part
from kvstore.tier import BlockHeader, BlockId, ReadRequest, Slot, WriteRequest
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.wire import Message
from kvstore_tiers.store import StoreTier
from kvstore_tiers.vram import VramTier


class PartStore:
    """Looks up, reads and writes one part of blocks, from and to the pages of one rank.

    Rank 0 says which block is in which page, and keeps a page's content still while it is read or written.
    """

    def __init__(
        self, address: str, pool: PagePool, part: Part, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tier = StoreTier(address)
        self._pages = VramTier(pool, pool.num_pages)
        self._page_bytes = pool.page_bytes
        self._part = part
        self._clock = clock
        self._layouts: dict[NamespaceDigest, KVLayout] = {}

    async def open(self) -> None:
        """Make it usable; the server need not be there.

        Raises:
            InvalidConfig: the address is malformed or too long.
        """
        await self._pages.open()
        await self._tier.open()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._tier.close()
        await self._pages.close()

    def know(self, namespace: Namespace) -> None:
        """Learn of a namespace whose blocks will be asked for."""
        self._layouts[namespace.digest] = namespace.layout
        self._tier.open_namespace(namespace)

    async def answer(self, message: Message) -> Message:
        """Do what a message asks for.

        Raises:
            ProtocolMismatch: it asks for nothing of a store, or names a namespace that nobody told of.
        """
        if isinstance(message, messages.Probe):
            return await self._probe(message)
        if isinstance(message, messages.Read):
            return await self._read(message)
        if isinstance(message, messages.Write):
            return await self._write(message)
        if isinstance(message, messages.Drop):
            await self._tier.drop(self._blocks(message))
            return messages.Done()
        raise ProtocolMismatch(f"ranks: {type(message).__name__} asks for nothing of a store")

    async def _probe(self, message: messages.Probe) -> messages.Probed:
        deadline_s = self._clock() + message.patience_s
        probe = await self._tier.probe(self._blocks(message), deadline_s=deadline_s)
        tiers: list[str] = []
        for name in probe.tiers:
            if name is None:
                break
            tiers.append(name)
        return messages.Probed(tiers, "" if probe.reason is None else probe.reason.value)

    async def _read(self, message: messages.Read) -> messages.Outcomes:
        deadline_s = self._clock() + message.patience_s
        slots = [Slot(slot) for slot in message.slots]
        async with self._pages.writing(slots, self._page_bytes) as buffers:
            requests = [
                ReadRequest(
                    block,
                    self._layout(block.namespace).fingerprint,
                    self._page_bytes,
                    buffer,
                    BlockKey(parent),
                    depth,
                )
                for block, parent, depth, buffer in zip(
                    self._blocks(message), message.parents, message.depths, buffers, strict=True
                )
            ]
            outcomes = await self._tier.read(requests, deadline_s=deadline_s)
        return messages.Outcomes(
            [outcome.status.value for outcome in outcomes],
            ["" if outcome.reason is None else outcome.reason.value for outcome in outcomes],
        )

    async def _write(self, message: messages.Write) -> messages.Outcomes:
        deadline_s = self._clock() + message.patience_s
        slots = [Slot(slot) for slot in message.slots]
        async with self._pages.reading(slots, self._page_bytes) as buffers:
            requests = [
                WriteRequest(
                    BlockHeader(
                        block,
                        BlockKey(parent),
                        depth,
                        self._layout(block.namespace).fingerprint,
                        self._page_bytes,
                        checksum=0,
                    ),
                    buffer,
                    is_summed=False,  # the tier sums what it copies
                )
                for block, parent, depth, buffer in zip(
                    self._blocks(message), message.parents, message.depths, buffers, strict=True
                )
            ]
            statuses = await self._tier.write(requests, deadline_s=deadline_s)
        return messages.Outcomes([status.value for status in statuses], [""] * len(statuses))

    def _blocks(
        self, message: messages.Probe | messages.Read | messages.Write | messages.Drop
    ) -> list[BlockId]:
        return [
            BlockId(NamespaceDigest(namespace), self._part, BlockKey(key))
            for namespace, key in zip(message.namespaces, message.keys, strict=True)
        ]

    def _layout(self, namespace: NamespaceDigest) -> KVLayout:
        layout = self._layouts.get(namespace)
        if layout is None:
            raise ProtocolMismatch("ranks: a block of a namespace that nobody told of")
        return layout
