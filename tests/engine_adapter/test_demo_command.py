"""``kvstore demo``: usage errors start nothing, and a signal ends everything that was started."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli import demo
from kvstore_engine_adapter.demo.processes import Child, Processes
from kvstore_engine_adapter.demo.scenario import DemoReport, PreparedDemo
from tests.engine.tiny_model import TinyModel

READY = 'import time; print(\'{"event": "ready"}\', flush=True); time.sleep(60)'


def _args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.register(parser.add_subparsers())
    return parser.parse_args(["demo", *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--document", "absent.txt"], "absent.txt"),
        (["--questions", "absent.txt"], "absent.txt"),
        (["--model", "absent.gguf"], "absent.gguf"),
        (["--model", "short.gguf"], "short.gguf"),
    ],
)
def test_unusable_files_end_it_with_status_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    monkeypatch.chdir(tmp_path)
    assert demo.run(_args(*words)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert expected in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("characters", [10_000, 1_000_000])
def test_a_document_beyond_the_models_context_ends_it_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], characters: int
) -> None:
    model, document = TinyModel().write_gguf(tmp_path / "m.gguf"), tmp_path / "long.txt"
    document.write_text("The old pier burned down. " * (characters // 26))
    assert demo.run(_args("--model", str(model), "--document", str(document))) == 2
    output = capsys.readouterr()
    assert output.err.startswith("kvstore: document: ")
    assert "shorte" in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    children: list[Child] = []

    async def waiting_demo(_: PreparedDemo, __: Callable[[str], None]) -> DemoReport:
        async with Processes(tmp_path) as processes:
            child = await processes.start("one", [sys.executable, "-c", READY])
            children.append(child)
            await processes.ready_event(child, timeout_s=30)
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("kvstore_engine_adapter.demo.run_demo", waiting_demo)
    monkeypatch.setattr(demo, "_prepared", lambda *_: None)
    assert demo.run(_args()) == 128 + number
    assert not children[0].is_running
