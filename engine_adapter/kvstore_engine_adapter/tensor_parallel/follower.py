"""A follower: the process of one rank other than 0. It decides nothing; rank 0 tells it what to do.

Rank 0 starts it as ``python -m kvstore_engine_adapter.tensor_parallel.follower CONTROL_FD PASS_FD``: two ends
of socket pairs. When rank 0 closes its end, or is gone, it ends at once, whatever it is doing.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from kvstore.errors import KVStoreError, ProtocolMismatch
from kvstore_engine_adapter.attention import PageOps
from kvstore_engine_adapter.device_pages import AttentionBackend, kernels_for, ops_on
from kvstore_engine_adapter.kv_dtype import TORCH_DTYPES, KVCacheDtype
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.model import LoadedModel, load_model
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.paged_engine import layout_of
from kvstore_engine_adapter.shard import Shard
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.collective import Collective
from kvstore_engine_adapter.tensor_parallel.part_store import PartStore
from kvstore_engine_adapter.tensor_parallel.wire import (
    LENGTH,
    Message,
    Pass,
    frame,
    frame_length,
    message_of,
    unframe,
)
from kvstore_engine_adapter.worker import ForwardWorker

logger = logging.getLogger(__name__)

_FAILED = 1


class Follower:
    """One rank's model, pages, and client of the store."""

    def __init__(self, passes: socket.socket) -> None:
        self._passes = passes
        self._threads = 1
        self._model: LoadedModel | None = None
        self._opened: _Opened | None = None
        self._computing: asyncio.Task[None] | None = None

    async def answer(self, message: Message) -> Message:
        """Do what a message asks for."""
        try:
            return await self._answer(message)
        except KVStoreError as error:
            return messages.nothing_of(message) or messages.Failed(str(error))
        except Exception as error:
            logger.exception("%s failed", type(message).__name__)
            return messages.nothing_of(message) or messages.Failed(f"{type(error).__name__}: {error}")

    def learn(self, message: messages.KnowNamespace) -> None:
        """Learn of a namespace, before what is asked of it next."""
        if self._opened is not None and self._opened.store is not None:
            self._opened.store.know(message.namespace())

    async def _answer(self, message: Message) -> Message:
        if isinstance(message, messages.Load):
            return await asyncio.to_thread(self._load, message)
        if isinstance(message, messages.Open):
            return await self._open(message)
        if isinstance(message, messages.Ping):
            return messages.Done()
        opened = self._opened
        if opened is None:
            raise ProtocolMismatch(f"ranks: {type(message).__name__} before Open")
        if isinstance(message, messages.Prepare):
            return await opened.worker.run(lambda: opened.prepare(message))
        if isinstance(message, messages.Ladder):
            return self._begin(opened, message)
        if isinstance(message, messages.Close):
            if opened.store is not None:
                await opened.store.close()
            return messages.Done()
        if opened.store is None:
            raise ProtocolMismatch(f"ranks: {type(message).__name__} without a store")
        return await opened.store.answer(message)

    def _load(self, message: messages.Load) -> messages.Loaded:
        self._threads = message.threads
        torch.set_num_threads(message.threads)
        self._model = load_model(
            Path(message.model),
            dtype=TORCH_DTYPES[message.dtype],
            device=device_of(message.device, message.rank),
            cache_folder=Path(message.cache_folder) if message.cache_folder else None,
            shard=Shard(message.rank, message.size),
        )
        return messages.Loaded(self._model.digest)

    async def _open(self, message: messages.Open) -> messages.Done:
        model = self._model
        if model is None:
            raise ProtocolMismatch("ranks: Open before Load")
        self._opened = await asyncio.to_thread(_Opened.make, model, message, self._threads)
        if message.store:
            layout = layout_of(model, message.block_tokens, KVCacheDtype(message.kv_cache_dtype))
            self._opened.store = PartStore(message.store, self._opened.pool, model.shard.part_of(layout))
            await self._opened.store.open()
        return messages.Done()

    def _begin(self, opened: "_Opened", message: messages.Ladder) -> messages.Done:
        opened.model.row_ladder = tuple(message.rows)
        # In the thread whose row counts were found to be exact.
        self._computing = asyncio.create_task(opened.worker.run(lambda: self._compute(opened)))
        return messages.Done()

    def _compute(self, opened: "_Opened") -> None:
        """Compute passes until rank 0 is gone. A rank that cannot keep step must not go on."""
        try:
            number = 0
            while (body := _receive(self._passes)) is not None:
                work = Pass.unpack(body)
                if work.number != number:
                    raise ProtocolMismatch(f"ranks: pass {work.number}, expected {number}")
                opened.worker.forward(work.copies, work.cleared, work.segments)
                number += 1
        except Exception:
            logger.exception("a pass failed: this rank ends")
            os._exit(_FAILED)


class _Opened:
    """What exists once the pages do."""

    def __init__(self, model: LlamaModel, pool: PagePool, ops: PageOps) -> None:
        self.model = model
        self.pool = pool
        self.ops = ops
        self.worker = ForwardWorker(model, pool, ops)
        self.store: PartStore | None = None

    @classmethod
    def make(cls, model: LoadedModel, message: messages.Open, threads: int) -> "_Opened":
        torch.set_num_threads(threads)
        device = model.weights.embedding.device
        config = model.shard.config_of(model.config)
        kept_as, computes_in = KVCacheDtype(message.kv_cache_dtype), model.weights.embedding.dtype
        layout = model.shard.pages_of(layout_of(model, message.block_tokens, kept_as))
        folder = Path(message.compiled_folder) if message.compiled_folder else None
        backend = AttentionBackend(message.attention_backend)
        kernels = kernels_for(layout, device, backend, folder, computes_in=computes_in)
        pool = PagePool(layout, message.num_pages, device, kernels=kernels, computes_in=computes_in)
        collective = Collective.join(
            Path(message.rendezvous), model.shard, device, patience_s=message.patience_s
        )
        forward_model = LlamaModel(
            config, model.weights, max_tokens=message.max_tokens, rank_sum=collective.sum
        )
        ops = ops_on(pool, num_heads=config.num_heads, folder=folder, backend=backend)
        return cls(forward_model, pool, ops)

    def prepare(self, message: messages.Prepare) -> messages.Ladder:
        self.ops.prepare()
        self.model.prepare(max_rows=message.max_rows, max_head_rows=None)
        return messages.Ladder(self.model.row_ladder)


def device_of(kind: str, rank: int) -> torch.device:
    """Return a rank's device: the CPU, or the CUDA device of its number."""
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def _receive(connection: socket.socket) -> bytes | None:
    """Return the next message's body, None at the end. Blocking."""
    head = _receive_exactly(connection, LENGTH.size)
    return None if head is None else _receive_exactly(connection, frame_length(head))


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(data)


async def serve(control: socket.socket, follower: Follower) -> None:
    """Answer rank 0 until it closes its end or says so."""
    reader, writer = await asyncio.open_connection(sock=control)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, message: Message) -> None:
        reply = await follower.answer(message)
        writer.write(frame([number, *reply.values()]))
        await writer.drain()
        if isinstance(message, messages.Close):
            os._exit(0)

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(LENGTH.size)
            number, *values = unframe(await reader.readexactly(frame_length(head)))
            message = message_of(values)
            if isinstance(message, messages.KnowNamespace):
                follower.learn(message)
                continue
            task = asyncio.create_task(answer(int(number), message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main() -> None:
    """Run a follower to its end."""
    # A supervisor's SIGTERM may reach all processes of a service: rank 0 decides when all is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control, passes = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s follower {os.getpid()} %(name)s: %(message)s",
    )
    asyncio.run(_serve_to_the_end(control, Follower(passes)))


async def _serve_to_the_end(control: socket.socket, follower: Follower) -> None:
    try:
        await serve(control, follower)
    except Exception:
        logger.exception("this rank ends")
    # Threads may be in the middle of a pass whose other ranks are gone.
    os._exit(_FAILED)


if __name__ == "__main__":
    main()
