"""LeadingWorker: rank 0's ForwardWorker, whose passes all ranks compute together."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore.tier import Slot
from kvstore_engine_adapter.attention import PageOps, Segment
from kvstore_engine_adapter.device_pages import AttentionBackend
from kvstore_engine_adapter.exact_rows import candidate_row_counts
from kvstore_engine_adapter.kv_dtype import KVCacheDtype
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.load_policy import PrefillSpeed
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.collective import Collective
from kvstore_engine_adapter.tensor_parallel.rank_group import RankGroup, RankLost
from kvstore_engine_adapter.tensor_parallel.wire import Pass
from kvstore_engine_adapter.worker import ForwardWorker


class RankSums:
    """The sum over ranks of one engine's passes, once the ranks have met."""

    def __init__(self) -> None:
        self.collective: Collective | None = None

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum; see ``Collective.sum``."""
        assert self.collective is not None, "the ranks have not met"
        return self.collective.sum(partial)


class LeadingWorker(ForwardWorker):
    """Announces each pass to the followers, then computes rank 0's share of it.

    A pass that fails here leaves ranks waiting for one another: the group is lost with it.
    """

    def __init__(
        self, model: LlamaModel, pool: PagePool, ops: PageOps, group: RankGroup, sums: RankSums
    ) -> None:
        super().__init__(model, pool, ops)
        self._group = group
        self._sums = sums

    async def meet(
        self,
        *,
        block_tokens: int,
        compiled_folder: Path | None,
        attention_backend: AttentionBackend,
        kv_cache_dtype: KVCacheDtype,
    ) -> None:
        """Have the followers get their pages, and join them.

        Raises:
            RankLost: a follower has ended, or could not.
        """
        group, device = self._group, self._pool.device
        message = messages.Open(
            str(group.rendezvous),
            group.patience_s,
            self._pool.num_pages,
            block_tokens,
            self._model.max_tokens,
            "" if compiled_folder is None else str(compiled_folder),
            group.store or "",
            attention_backend.value,
            kv_cache_dtype.value,
        )

        def join() -> Collective:
            try:
                return Collective.join(group.rendezvous, group.shard, device, patience_s=group.patience_s)
            except RuntimeError as error:
                raise group.break_up(f"the ranks have not met: {error}") from error

        opening = asyncio.ensure_future(group.ask(message, messages.Done))
        try:
            self._sums.collective = await self.run(join)
            await opening
        finally:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, RankLost):
                await opening

    async def prepare(self, spare: Sequence[Slot], *, max_rows: int, max_head_rows: int) -> PrefillSpeed:
        """Find the row counts that are exact on every rank; measure prefill, using spare pages.

        Raises:
            RankLost: a follower has ended, or could not.
        """
        asking = asyncio.ensure_future(self._group.ask(messages.Prepare(max_rows), messages.Ladder))
        try:
            await self.run(self._ops.prepare)
            await self.run(lambda: self._model.prepare(max_rows=max_rows, max_head_rows=max_head_rows))
            answers = await asking
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, RankLost):
                await asking
        common = set(self._model.row_ladder).intersection(*(answer.rows for answer in answers))
        # Nothing in common: on one rank no count is exact, as its log says.
        self._model.row_ladder = tuple(sorted(common)) or tuple(candidate_row_counts(max_rows))
        await self._group.ask(messages.Ladder(list(self._model.row_ladder)), messages.Done)
        return await self.run(lambda: self._prefill_speed(spare))

    def forward(
        self,
        copies: Sequence[tuple[Slot, Slot]],
        cleared: Sequence[Slot],
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        """Have all ranks copy and clear pages and compute the segments; see ForwardWorker.

        When it returns, no rank touches the pages any more: the last sum has had every rank's share.

        Raises:
            RankLost: a rank has ended, or failed.
        """
        self._group.announce(Pass(self._group.next_pass(), copies, cleared, segments))
        try:
            hidden = super().forward(copies, cleared, segments)
            # Until the device has come to the sum, a rank may be behind, and its pages in use.
            self._pool.finish()
            return hidden
        except Exception as error:
            raise self._group.note_failed_pass(error) from error
