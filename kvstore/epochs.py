"""EpochKeeper: ends the epochs of models, keeps that across restarts, and shares it with other nodes.

Ending an epoch makes every block of the model's older namespaces unreachable at once, in all tiers, since no
lookup of such a namespace is answered any more. Their space is reclaimed bit by bit afterwards. Nodes that
share a remote tier learn of it there, within POLL_S while that tier answers.
"""

import asyncio
import contextlib
import hashlib
import logging
import struct
from collections.abc import Sequence

from kvstore.checksum import checksum
from kvstore.directory import BlockEntry
from kvstore.epoch_file import EpochFile
from kvstore.errors import CorruptBlock, TierUnavailable
from kvstore.keys import BlockKey, is_model, require_model
from kvstore.layout import Part
from kvstore.log_limit import LimitedWarning
from kvstore.miss import MissReason
from kvstore.shared_records import EPOCH_RECORDS
from kvstore.space import Space
from kvstore.state import State
from kvstore.tier import (
    BlockHeader,
    BlockId,
    Medium,
    ReadRequest,
    ReadStatus,
    Tier,
    WriteRequest,
    WriteStatus,
)

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""How often epochs of other nodes are asked for, and stale blocks reclaimed."""

_RECLAIM_BLOCKS = 64
_MAX_MODELS = 256
_MAX_EPOCH = (1 << 63) - 1
_RECORD = struct.Struct("<8sQ")
_MAGIC = b"KVEPOCH1"
_LAYOUT = hashlib.sha256(b"kvstore.epoch.record.1").digest()
_SHARE_TIMEOUT_S = 1.0


def epoch_record_id(model: str) -> BlockId:
    """Return the name under which the remote tier holds a model's epoch: like a block, header and all."""
    key = BlockKey(hashlib.sha256(EPOCH_RECORDS + model.encode()).digest())
    return BlockId(EPOCH_RECORDS, Part(0, 1, 0, 1), key)


def _record(model: str, epoch: int) -> WriteRequest:
    payload = _RECORD.pack(_MAGIC, epoch)
    header = BlockHeader(
        block=epoch_record_id(model),
        parent=BlockKey(EPOCH_RECORDS),
        depth=0,
        layout=_LAYOUT,
        length_bytes=len(payload),
        checksum=checksum(payload),
    )
    return WriteRequest(header, memoryview(payload))


class EpochKeeper:
    """Epochs of one manager. ``file`` None: nothing survives a restart, as nothing else does."""

    def __init__(self, state: State, space: Space, file: EpochFile | None) -> None:
        self._state = state
        self._space = space
        self._file = file
        self._has_news = asyncio.Event()
        self._untold = LimitedWarning(logger, interval_s=60.0, clock=state.clock)

    async def open(self) -> bool:
        """Read the epochs of earlier runs; False if they are lost, so that nothing stored can be trusted."""
        try:
            epochs = await asyncio.to_thread(self._file.read) if self._file is not None else {}
        except CorruptBlock as error:
            logger.error("epochs: %s: what earlier runs stored is dropped", error)
            return False
        for model, epoch in epochs.items():
            if is_model(model):  # an earlier version took names that no namespace can have
                self._state.directory.raise_epoch(model, epoch)
        await self._share()
        return True

    def note_namespace(self) -> None:
        """A namespace was opened: ask for its model's epoch soon."""
        self._has_news.set()

    async def advance(self, model: str) -> int:
        """End the model's epoch on this node now and on others as soon as they hear; return the new one.

        Raises:
            InvalidRequest: no namespace can name such a model.
            TierUnavailable: it cannot be kept across a restart, or the remote tier does not take it now. It
                has ended on this node all the same, and telling others is tried on and on.
        """
        require_model(model)
        directory = self._state.directory
        directory.raise_epoch(model, directory.epoch(model) + 1)
        untold = await self._share()
        await self.keep()
        if untold:
            raise TierUnavailable(
                f"{', '.join(untold)}: epoch {directory.epoch(model)} of {model!r} holds on this node, but "
                "could not be told to others, and may be forgotten with it: they hear of it as soon as the "
                "tier takes it; see its state in the stats, and advance again if this node ends before"
            )
        return directory.epoch(model)

    async def poll_forever(self) -> None:
        """Follow other nodes and reclaim the space of stale blocks, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._has_news.wait()
            self._has_news.clear()
            try:
                await self._follow()
                await self.reclaim()
            except Exception:
                logger.exception("following epochs failed; it is tried again")

    async def _follow(self) -> None:
        before = self._state.directory.epochs()
        await self._share()
        if self._state.directory.epochs() != before:
            await self.keep()

    async def _share(self) -> list[str]:
        """Exchange epochs with the remote tier: the higher one wins on both sides.

        Returns the tiers that were not told of an epoch ended here.
        """
        directory = self._state.directory
        untold: list[str] = []
        models = {space.model for space in directory.namespaces()[-_MAX_MODELS:]} | set(directory.epochs())
        for tier in self._state.lower:
            if tier.medium is not Medium.REMOTE or not models:
                continue
            deadline_s = self._state.clock() + _SHARE_TIMEOUT_S
            is_told = tier.health().is_up and await self._exchange(tier, sorted(models), deadline_s)
            if not is_told and directory.epochs():
                untold.append(tier.name)
                self._untold.warn("%s: does not take the epochs of models; it is tried again", tier.name)
        return untold

    async def _exchange(self, tier: Tier, models: Sequence[str], deadline_s: float) -> bool:
        """Exchange with one tier; False if an epoch of ours is higher than what it holds now."""
        directory = self._state.directory
        requests = [
            ReadRequest(epoch_record_id(model), _LAYOUT, _RECORD.size, memoryview(bytearray(_RECORD.size)))
            for model in models
        ]
        outcomes = await tier.read(requests, deadline_s=deadline_s)
        behind: list[WriteRequest] = []
        is_told = True
        for model, request, outcome in zip(models, requests, outcomes, strict=True):
            stored = 0
            if outcome.status is ReadStatus.OK:
                _, stored = _RECORD.unpack(request.buffer)
                directory.raise_epoch(model, min(stored, _MAX_EPOCH))
            is_known = outcome.status in (ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.CORRUPT)
            if directory.epoch(model) > stored:
                is_told = is_told and is_known
                behind += [_record(model, directory.epoch(model))] if is_known else []
        statuses = await tier.write(behind, deadline_s=deadline_s) if behind else []
        return is_told and all(status is WriteStatus.OK for status in statuses)

    async def keep(self) -> None:
        """Write the epochs down for the next run.

        Raises:
            TierUnavailable: they cannot be written.
        """
        if self._file is not None:
            await asyncio.to_thread(self._file.write, self._state.directory.epochs())

    async def reclaim(self) -> None:
        """Drop one batch of blocks of ended epochs from all tiers."""
        state = self._state
        entries = state.directory.stale_entries(_RECLAIM_BLOCKS)
        for entry in entries:
            if entry.is_ready(state.top.name) and not entry.is_kept:
                state.forget_copy(entry, state.top.name, MissReason.OTHER_EPOCH)
                state.counters.evictions[f"{state.top.name}/epoch"] += 1
        for tier in state.lower:
            going = [entry for entry in entries if self._may_go(entry, tier.name)]
            if going:
                await self._space.drop_copies(tier, going, MissReason.OTHER_EPOCH)
                state.counters.evictions[f"{tier.name}/epoch"] += len(going)

    def _may_go(self, entry: BlockEntry, tier: str) -> bool:
        return entry.is_ready(tier) and not entry.is_kept
