"""Keys and values kept as fp8: reuse changes no bit, and blocks of other dtypes never mix with them."""

import asyncio
import contextlib

import pytest
import torch

from kvstore.testing import MemoryTier
from kvstore_engine_adapter.generation import Finished, GenerateRequest, Token
from kvstore_engine_adapter.kv_dtype import KVCacheDtype
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine, block_bytes_of
from kvstore_kernels.kernels import ReferenceKernels

PROMPT = torch.randint(3, 300, (203,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = PROMPT[:100] + torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(2)).tolist()


@contextlib.asynccontextmanager
async def opened(model, *, lower=(), kernels=None, kept_as=KVCacheDtype.FP8, **settings):
    settings = EngineSettings(max_model_tokens=320, kv_cache_dtype=kept_as, **settings)
    engine = PagedEngine(model, settings, lower=lower, kernels=kernels)
    await engine.open()
    try:
        yield engine
        if engine.manager is not None:
            assert await engine.manager.flush(timeout_s=60)
            assert await engine.manager.check() == []
    finally:
        await engine.close()


async def answer(engine, prompt):
    request = GenerateRequest(prompt, 8, wants_first_logits=True)
    events = [event async for event in engine.generate(request)]
    assert isinstance(events[-1], Finished)
    return [event.token for event in events if isinstance(event, Token)], events[-1].report


@pytest.fixture(params=["torch", "compiled", "kernels"])
def parts(request, tmp_path):
    """What attends over the pages."""
    match request.param:
        case "torch":
            return {}
        case "compiled":
            return {"compiled_folder": tmp_path / "compiled"}
        case _:
            return {"kernels": ReferenceKernels()}


async def test_loaded_and_shared_blocks_of_fp8_change_no_bit(parts, tiny_bf16):
    async with opened(tiny_bf16, is_reusing=False, **parts) as engine:
        cold = [await answer(engine, prompt) for prompt in (PROMPT, OTHER)]
    tier = MemoryTier()
    async with opened(tiny_bf16, lower=[tier], **parts) as engine:
        first = await asyncio.gather(*(answer(engine, prompt) for prompt in (PROMPT, OTHER)))
    async with opened(tiny_bf16, lower=[tier], **parts) as engine:
        second = await asyncio.gather(*(answer(engine, prompt) for prompt in (PROMPT, OTHER)))

    for found in (first, second):
        for (tokens, report), (wanted, cold_report) in zip(found, cold, strict=True):
            assert tokens == wanted
            assert (report.first_logits == cold_report.first_logits).all()
    assert [report.matched_tokens for _, report in second] == [192, 144]


async def test_blocks_of_fp8_are_half_as_large_and_no_other_dtype_finds_them(tiny_bf16, tiny_f32):
    tier = MemoryTier()
    matched = {}
    for name, model, kept_as in (
        ("fp8", tiny_bf16, KVCacheDtype.FP8),
        ("bfloat16", tiny_bf16, KVCacheDtype.AUTO),
        ("fp8 of float32", tiny_f32, KVCacheDtype.FP8),
        ("fp8 again", tiny_bf16, KVCacheDtype.FP8),
    ):
        async with opened(model, lower=[tier], kept_as=kept_as) as engine:
            matched[name] = (await answer(engine, PROMPT))[1].matched_tokens

    assert matched == {"fp8": 0, "bfloat16": 0, "fp8 of float32": 0, "fp8 again": 192}
    sizes = [block_bytes_of(tiny_bf16, 16, kept_as) for kept_as in KVCacheDtype]
    assert sizes[0] == 2 * sizes[1]
