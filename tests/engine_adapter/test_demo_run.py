"""The whole demo over real processes, with a tiny random model: everything must hold but the times."""

from pathlib import Path

from kvstore_engine_adapter.demo import DemoSettings, prepare_demo, run_demo
from kvstore_engine_adapter.demo.texts import load_texts
from tests.engine.tiny_model import TinyModel


async def test_every_tier_serves_the_text_and_every_answer_is_right(tmp_path: Path) -> None:
    model = TinyModel().write_folder(tmp_path / "tiny", max_position_embeddings=4096)
    document = tmp_path / "document.txt"
    document.write_text("The harbour master keeps a log of every ship that comes and goes. " * 60, "utf-8")
    prepared = prepare_demo(DemoSettings(model=model, texts=load_texts(document)))

    lines: list[str] = []
    report = await run_demo(prepared, lines.append)

    # How much sooner a tiny model's first token comes says nothing.
    assert [line for line in report.broken if "sooner" not in line and "first token" not in line] == []
    assert set(report.trials) == {"vram", "dram", "ssd", "remote"}
    assert report.redis_stopped is not None
    assert lines
