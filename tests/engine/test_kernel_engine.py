"""PagedEngine over the paged kernels: its answers, and its blocks on their way to a lower tier and back."""

import asyncio
import contextlib

import pytest
import torch

from kvstore.layout import KVLayout
from kvstore.testing import MemoryTier
from kvstore_engine_adapter.device_memory import DeviceMemory, blocks_in, pass_bytes
from kvstore_engine_adapter.device_pages import AttentionBackend, kernels_for, ops_on
from kvstore_engine_adapter.generation import Finished, GenerateRequest, Token
from kvstore_engine_adapter.kernel_page_ops import KernelPageOps
from kvstore_engine_adapter.model import load_model
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine, layout_of
from kvstore_kernels import KernelsUnavailable
from kvstore_kernels.kernels import ReferenceKernels
from tests.engine.conftest import CPU

PROMPTS = [
    torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    for count in (70, 33, 16)
]
ANSWER = 6


@contextlib.asynccontextmanager
async def opened(model, kernels, *, lower=(), **settings):
    engine = PagedEngine(
        model, EngineSettings(max_model_tokens=128, **settings), lower=lower, kernels=kernels
    )
    await engine.open()
    try:
        yield engine
        if engine.manager is not None:
            assert await engine.manager.flush(timeout_s=60)
            assert await engine.manager.check() == []
    finally:
        await engine.close()


async def answer(engine, prompt):
    request = GenerateRequest(prompt, ANSWER, wants_first_logits=True)
    events = [event async for event in engine.generate(request)]
    assert isinstance(events[-1], Finished)
    return [event.token for event in events if isinstance(event, Token)], events[-1].report


async def answers_of(engine):
    return await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))


@pytest.fixture(params=["reference", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine_parts(request, tiny_f32, tiny_bf16, tiny_gguf):
    """A model and kernels for it."""
    match request.param:
        case "reference":
            return tiny_f32, ReferenceKernels()
        case "emulated":
            return tiny_bf16, request.getfixturevalue("emulated_kernels")
        case _:
            if not torch.cuda.is_available():
                pytest.skip("no CUDA device")
            device = torch.device("cuda", torch.cuda.current_device())
            return load_model(tiny_gguf, dtype=torch.bfloat16, device=device), None


async def test_the_first_logits_are_as_close_to_float32_as_the_cpus(engine_parts, tiny_f32, tiny_bf16):
    model, kernels = engine_parts
    async with opened(tiny_f32, None, is_reusing=False) as engine:
        wanted = await answers_of(engine)
    async with opened(tiny_bf16, None, is_reusing=False) as engine:
        of_cpu = await answers_of(engine)
    async with opened(model, kernels) as engine:
        found = await answers_of(engine)
    assert difference(found, wanted) <= (1e-3 if model is tiny_f32 else 1.5 * difference(of_cpu, wanted))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted] or model is not tiny_f32


def difference(answers, others):
    """The largest difference of first logits."""
    pairs = zip(answers, others, strict=True)
    return max(abs(one.first_logits - other.first_logits).max() for (_, one), (_, other) in pairs)


async def test_blocks_from_a_lower_tier_give_the_answers_that_computing_them_gave(engine_parts):
    model, kernels = engine_parts
    store = MemoryTier(is_shared=True)
    async with opened(model, kernels, lower=[store]) as engine:
        first = await answers_of(engine)
    async with opened(model, kernels, lower=[store]) as engine:
        # Loading is tried whatever is expected of it.
        engine._running.supply.policy.prefill.factor = 1e6
        again = await answers_of(engine)
        stats = engine.manager.stats()
    assert [report.tokens_by_tier for _, report in again] == [{"memory": 64}, {"memory": 32}, {}]
    for (tokens, report), (wanted_tokens, wanted_report) in zip(again, first, strict=True):
        assert tokens == wanted_tokens
        if kernels is not None and not isinstance(kernels, ReferenceKernels):
            assert (report.first_logits == wanted_report.first_logits).all()
    vram = stats["tiers"]["vram"]
    assert vram["capacity_bytes"] == engine.num_page_slots * engine.layout.block_bytes
    assert vram["used_bytes"] > 0


def test_a_cpu_has_no_paged_kernels_and_kernels_are_used_as_the_backend_says(tiny_bf16):
    layout = layout_of(tiny_bf16, 16)
    assert kernels_for(layout, CPU, AttentionBackend.EXACT, None) is None
    pool = PagePool(layout, 4, CPU, kernels=ReferenceKernels())
    ops = {backend: ops_on(pool, num_heads=4, folder=None, backend=backend) for backend in AttentionBackend}
    assert all(isinstance(each, KernelPageOps) for each in ops.values())
    assert [ops[backend].decodes_apart for backend in AttentionBackend] == [False, True, True]


@pytest.mark.parametrize("error", [ImportError("no cupy"), KernelsUnavailable("no driver")])
def test_a_device_on_which_kernels_cannot_run_is_served_by_torch(monkeypatch, caplog, error):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr("kvstore_engine_adapter.device_pages.open_kernels", failing)
    half = KVLayout("float16", 2, 16, 2, 64)
    assert kernels_for(half, torch.device("cuda", 0), AttentionBackend.EXACT, None) is None
    assert f"the CUDA kernels cannot run, torch does their work, slower: {error}" in caplog.text


@pytest.mark.parametrize("layout", [KVLayout("float32", 2, 16, 2, 64), KVLayout("float16", 2, 16, 2, 60)])
def test_what_the_kernels_do_not_take_is_served_by_torch(layout):
    assert kernels_for(layout, torch.device("cuda", 0), AttentionBackend.EXACT, None) is None


def test_the_tier_takes_what_the_share_leaves_beside_model_passes_and_spare_pages():
    memory = DeviceMemory(free_bytes=60 << 30, total_bytes=80 << 30)
    blocks = blocks_in(memory, 0.9, block_bytes=2 << 20, working_bytes=4 << 30, spare_blocks=513)
    taken = (blocks + 513) * (2 << 20) + (4 << 30) + (20 << 30)
    assert 0 <= int(0.9 * (80 << 30)) - taken < 2 << 20
    assert blocks_in(memory, 0.2, block_bytes=2 << 20, working_bytes=4 << 30, spare_blocks=513) == 0


def test_what_a_pass_works_with_grows_with_its_tokens_and_sequences(tiny_f32):
    small = pass_bytes(tiny_f32.config, step_tokens=128, max_num_seqs=8)
    assert pass_bytes(tiny_f32.config, step_tokens=2048, max_num_seqs=8) > small
    assert pass_bytes(tiny_f32.config, step_tokens=128, max_num_seqs=64) > small
