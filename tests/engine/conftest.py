"""The tiny model as loaded model, and engines over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore_engine_adapter.model import LoadedModel, load_model
from tests.engine.tiny_model import TinyModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="session")
def tiny_folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_bf16(tiny_gguf: Path) -> LoadedModel:
    return load_model(tiny_gguf, dtype=torch.bfloat16, device=CPU)


@pytest.fixture(scope="session")
def tiny_f32(tiny_gguf: Path) -> LoadedModel:
    return load_model(tiny_gguf, dtype=torch.float32, device=CPU)
