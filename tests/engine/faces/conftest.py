"""A face over a tiny model whose answers vary, and the official client of it."""

import pytest
import torch

from kvstore_engine_adapter.faces.memory_records import MemoryRecords
from kvstore_engine_adapter.model import load_model
from tests.engine.faces.face_server import face_server
from tests.engine.faces.session_kit import apis
from tests.engine.tiny_model import TinyModel


@pytest.fixture(scope="session")
def lively_gguf(tmp_path_factory):
    """A model whose embeddings are not tied: with tied random ones a token mostly repeats itself."""
    return TinyModel(is_tied=False).write_gguf(tmp_path_factory.mktemp("model") / "lively.gguf")


@pytest.fixture(scope="session")
def lively(lively_gguf):
    return load_model(lively_gguf, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.fixture
async def server(lively):
    async with face_server(lively) as server:
        yield server


@pytest.fixture
async def client(server):
    async with server.async_openai() as client:
        yield client


@pytest.fixture
def records():
    return MemoryRecords()


@pytest.fixture
async def api(lively, records):
    async with apis(lively, records) as (api,):
        yield api
