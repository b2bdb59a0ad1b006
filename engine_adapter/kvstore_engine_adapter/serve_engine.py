"""Running one engine as a process: model, engine, HTTP face, until a signal ends it."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvstore.async_client import AsyncKVStore
from kvstore.client_state import Timeouts
from kvstore.doors import Doors
from kvstore.errors import InvalidConfig
from kvstore.tier import Tier
from kvstore_engine_adapter.device_memory import DEFAULT_RATIO, DeviceMemory, blocks_in, pass_bytes
from kvstore_engine_adapter.device_pages import AttentionBackend
from kvstore_engine_adapter.faces.engine_doors import DoorOptions, EngineDoors
from kvstore_engine_adapter.faces.face_server import FaceServer
from kvstore_engine_adapter.faces.http_face import FaceDoors, HttpFace
from kvstore_engine_adapter.faces.record_access import SessionLimits
from kvstore_engine_adapter.kv_dtype import KVCacheDtype
from kvstore_engine_adapter.model import LoadedModel
from kvstore_engine_adapter.paged_engine import (
    OTHER_STEP_TOKENS,
    EngineSettings,
    PagedEngine,
    block_bytes_of,
    default_context_tokens,
)
from kvstore_engine_adapter.store_watch import StoreWatch
from kvstore_engine_adapter.tensor_parallel.rank_group import RankGroup
from kvstore_engine_adapter.tensor_parallel.starting import ModelOrder, end_process_within, loaded

logger = logging.getLogger(__name__)

_LEAST_BLOCKS = 2
_LEAST_DRAIN_S = 0.1
_CLOSE_S = 0.25
_LOST_S = 20.0
_MAX_SALT_BYTES = 4096
_RECORD_TIMES = Timeouts(fetch_s=1.0, put_s=1.0, control_s=1.0)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``kvstore engine`` is told; ``store`` is a store's address, None for reuse within the engine only.

    ``kv_cache_bytes``, ``num_blocks`` and ``gpu_memory_ratio`` (of a CUDA device's memory, weights included)
    all size the ``vram`` tier: at most one is given (none: 0.9 of a CUDA device's memory, on a CPU see
    ``EngineSettings``), and ``max_model_tokens`` does not exceed what it holds
    (None: the most that it does). ``grace_s`` is the time that requests under way and unwritten blocks have
    after the signal that ends it. Digests of model files are remembered in ``cache_folder``. Sessions and
    responses are kept in the store if there is one, else in memory, within ``session_limits``.
    """

    model: Path
    store: str | None = None
    doors: DoorOptions = field(default_factory=DoorOptions)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    served_model_name: str | None = None
    max_model_tokens: int | None = None
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    gpu_memory_ratio: float | None = None
    max_num_seqs: int = 32
    tensor_parallel_size: int = 1
    block_tokens: int = 16
    threads: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"
    attention_backend: AttentionBackend = AttentionBackend.EXACT
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    tenant_salt_file: Path | None = None
    is_reusing: bool = True
    grace_s: float = 5.0
    lower: Sequence[Tier] = field(default=())
    cache_folder: Path | None = None


async def serve_engine(options: ServeOptions, announce: Callable[[dict[str, object]], None]) -> None:
    """Load, listen, call ``announce`` with the ``ready`` event, and serve until SIGTERM or SIGINT.

    After the signal it ends within the grace and a second, but for a pass under way. When a rank is lost it
    ends at once; the process should end then, and does so after a while in any case.

    Raises:
        RankLost: a rank of several has ended, does not answer, or could not do its share.
        UnsupportedModel: the model cannot be loaded.
        InvalidConfig: an option this machine cannot offer, an address that cannot be bound.
        InvalidLayout: blocks of that size cannot be stored.
        TierUnavailable: the store's address is no address.
    """
    _refuse_what_excludes(options)
    engine_doors = await asyncio.to_thread(EngineDoors.make, options.doors)
    salt = _tenant_salt(options.tenant_salt_file)
    torch.set_num_threads(options.threads)
    end = _End(options.grace_s)
    async with loaded(_order(options)) as (model, group):
        engine = PagedEngine(model, _settings(options, model, salt), lower=options.lower, group=group)
        await engine.open()
        try:
            async with _records(options.store) as records, end.noticing(group):
                face_doors = FaceDoors(
                    gate=engine_doors.doors.gate,
                    has_tenants=engine_doors.has_tenants,
                    records=records,
                    limits=options.session_limits,
                    salt=salt,
                )
                name = options.served_model_name or model.config.name
                face = HttpFace(engine, model.tokenizer, model_name=name, doors=face_doors)
                await _serve(options, engine, face, engine_doors.doors, announce, end)
        finally:
            await _close_engine(engine, max(end.left_s, _LEAST_DRAIN_S))
        if group is not None and group.lost is not None:
            raise group.lost


def _order(options: ServeOptions) -> ModelOrder:
    return ModelOrder(
        options.model,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        num_ranks=options.tensor_parallel_size,
        store=options.store,
        cache_folder=options.cache_folder,
    )


class _End:
    """The end of serving: SIGTERM and SIGINT, with a grace; or the loss of a rank, without any."""

    def __init__(self, grace_s: float) -> None:
        self.left_s = grace_s
        self.has_come = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.has_come.set)

    @contextlib.asynccontextmanager
    async def noticing(self, group: RankGroup | None) -> AsyncIterator[None]:
        """Notice the loss of a rank inside the block."""
        watching = None if group is None else asyncio.create_task(self._watch(group))
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait([watching])

    async def _watch(self, group: RankGroup) -> None:
        end_process_within(_LOST_S, await group.wait_lost())
        self.left_s = 0.0
        self.has_come.set()


@contextlib.asynccontextmanager
async def _records(store: str | None) -> AsyncIterator[AsyncKVStore | None]:
    """Have a client of the store for sessions, and its outages watched; None where there is no store."""
    if store is None:
        yield None
        return
    watching = asyncio.create_task(StoreWatch(store).run())
    try:
        async with await AsyncKVStore.connect(store, timeouts=_RECORD_TIMES) as client:
            yield client
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def _refuse_what_excludes(options: ServeOptions) -> None:
    if options.doors.api_keys is not None and options.tenant_salt_file is not None:
        raise InvalidConfig(
            "engine: --api-keys and --tenant-salt-file exclude each other: a keyring gives each tenant a salt"
        )


def _settings(options: ServeOptions, model: LoadedModel, salt: bytes) -> EngineSettings:
    num_blocks = _num_blocks(options, model)
    return EngineSettings(
        block_tokens=options.block_tokens,
        max_model_tokens=_max_model_tokens(options, model, num_blocks),
        num_blocks=num_blocks,
        is_reusing=options.is_reusing,
        tenant_salt=salt,
        served_name=options.served_model_name,
        max_num_seqs=options.max_num_seqs,
        attention_backend=options.attention_backend,
        kv_cache_dtype=options.kv_cache_dtype,
        compiled_folder=None if options.cache_folder is None else options.cache_folder / "compiled",
    )


async def _close_engine(engine: PagedEngine, drain_s: float) -> None:
    closing = asyncio.ensure_future(engine.close(drain_s=drain_s))
    await asyncio.wait([closing], timeout=drain_s + _CLOSE_S)
    if not closing.done():
        logger.warning("engine: its store has not let go after %g s: abandoned", drain_s + _CLOSE_S)
        closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing


async def _serve(
    options: ServeOptions,
    engine: PagedEngine,
    face: HttpFace,
    doors: Doors,
    announce: Callable[[dict[str, object]], None],
    end: _End,
) -> None:
    """Serve until the end comes, and end the requests."""
    server = FaceServer(face, tls=doors.tls, shutdown_s=_CLOSE_S / 2)
    doors.start()
    try:
        await server.start(options.doors.address, options.doors.port)
        if end.has_come.is_set():
            return
        announce({"event": "ready", "url": server.url, "context_tokens": engine.context_tokens})
        await end.has_come.wait()
        started_s = time.monotonic()
        await server.stop_listening()
        await face.close(grace_s=end.left_s)
        end.left_s -= time.monotonic() - started_s
    finally:
        await server.stop()
        doors.stop()


def _tenant_salt(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        salt = path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"engine: --tenant-salt-file {path}: {error.strerror}") from error
    if not 16 <= len(salt) <= _MAX_SALT_BYTES:
        raise InvalidConfig(
            f"engine: --tenant-salt-file {path}: {len(salt)} bytes, expected 16 to {_MAX_SALT_BYTES}"
        )
    return salt


def _num_blocks(options: ServeOptions, model: LoadedModel) -> int | None:
    """Return the size of the vram tier, None if it was not given.

    Raises:
        InvalidConfig: it holds no block of prompt with a token of answer.
    """
    block_bytes = block_bytes_of(model, options.block_tokens, options.kv_cache_dtype)
    if options.kv_cache_bytes is not None:
        num_blocks = options.kv_cache_bytes // block_bytes
        given = f"--kv-cache-bytes {options.kv_cache_bytes}"
    elif options.num_blocks is not None:
        num_blocks, given = options.num_blocks, f"--num-blocks {options.num_blocks}"
    elif options.gpu_memory_ratio is not None or options.device == "cuda":
        ratio = options.gpu_memory_ratio or DEFAULT_RATIO
        num_blocks, given = _blocks_in_device(ratio, options, model), f"--gpu-memory-utilization {ratio:g}"
    else:
        return None
    if num_blocks < _LEAST_BLOCKS:
        raise InvalidConfig(
            f"engine: {given}, in blocks of {block_bytes} bytes holds {num_blocks}: "
            f"give at least {_LEAST_BLOCKS}, one of prompt and one of answer"
        )
    return num_blocks


def _blocks_in_device(ratio: float, options: ServeOptions, model: LoadedModel) -> int:
    """Return how many blocks a share of a device's memory holds beside what is in it, and the spare pages.

    Raises:
        InvalidConfig: the model is on no CUDA device.
    """
    if options.device != "cuda":
        raise InvalidConfig(
            "engine: --gpu-memory-utilization is of a CUDA device: with --device cpu give --kv-cache-bytes"
        )
    # The engine takes pages for one sequence of full length beside the tier, and one that nothing is in.
    longest = options.max_model_tokens or default_context_tokens(model)
    return blocks_in(
        DeviceMemory(*torch.cuda.mem_get_info()),
        ratio,
        block_bytes=block_bytes_of(model, options.block_tokens, options.kv_cache_dtype) // model.shard.size,
        working_bytes=pass_bytes(
            model.shard.config_of(model.config),
            step_tokens=OTHER_STEP_TOKENS,
            max_num_seqs=options.max_num_seqs,
        ),
        spare_blocks=-(-longest // options.block_tokens) + 1,
    )


def _max_model_tokens(options: ServeOptions, model: LoadedModel, num_blocks: int | None) -> int | None:
    """Return the longest sequence to offer: no longer than the vram tier holds.

    Raises:
        InvalidConfig: more was asked for than it holds.
    """
    if num_blocks is None:
        return options.max_model_tokens
    held = num_blocks * options.block_tokens
    if options.max_model_tokens is not None:
        if options.max_model_tokens > held:
            raise InvalidConfig(
                f"engine: --max-model-len {options.max_model_tokens}, but {num_blocks} blocks of "
                f"{options.block_tokens} tokens hold {held}: lower it, or give more blocks"
            )
        return options.max_model_tokens
    return min(held, default_context_tokens(model))
