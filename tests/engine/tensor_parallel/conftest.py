"""A tiny model that 2 and 3 ranks can share, and engines of several ranks over it."""

import contextlib

import pytest

from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine
from kvstore_engine_adapter.tensor_parallel.starting import ModelOrder, loaded
from kvstore_tiers.store import StoreTier
from tests.engine.tiny_model import TinyModel

KV_HEADS = 6


@pytest.fixture(scope="session")
def shared_gguf(tmp_path_factory):
    tiny = TinyModel(heads=2 * KV_HEADS, kv_heads=KV_HEADS)
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@contextlib.asynccontextmanager
async def engine_of(path, num_ranks, *, dtype="float32", store=None, **settings):
    """An open engine over so many ranks, and their group."""
    order = ModelOrder(path, dtype, "cpu", threads=1, num_ranks=num_ranks, store=store)
    async with loaded(order) as (model, group):
        lower = () if store is None else (StoreTier(store),)
        engine = PagedEngine(
            model, EngineSettings(max_model_tokens=512, **settings), lower=lower, group=group
        )
        await engine.open()
        try:
            yield engine, group
        finally:
            await engine.close()
