"""The demo's processes: readiness, last words, and that nothing outlives the demo."""

import os
import signal
import sys
from pathlib import Path

import pytest

from kvstore_engine_adapter.demo.processes import DemoFailed, Processes
from kvstore_engine_adapter.demo.redis_server import start_redis

READY = 'import sys, time; print(\'hello\'); print(\'{"event": "ready", "url": "u"}\', flush=True); '
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_ready_event_is_returned_and_the_child_is_ended(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        child = await processes.start("one", _python(READY + "time.sleep(60)"))
        assert await processes.ready_event(child, timeout_s=30) == {"event": "ready", "url": "u"}
    assert child.process.returncode == -signal.SIGTERM


async def test_a_stopped_child_is_ended_too(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        child = await processes.start("one", _python(READY + "time.sleep(60)"))
        await processes.ready_event(child, timeout_s=30)
        child.pause()
    assert not child.is_running


async def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_engine_adapter.demo.processes._GRACE_S", 0.2)
    async with Processes(tmp_path) as processes:
        child = await processes.start("one", _python(DEAF + READY + "time.sleep(60)"))
        await processes.ready_event(child, timeout_s=30)
    assert child.process.returncode == -signal.SIGKILL


async def test_children_are_ended_when_the_demo_fails(tmp_path: Path) -> None:
    started: list[int] = []

    async def failing_demo() -> None:
        async with Processes(tmp_path) as processes:
            child = await processes.start("one", _python(READY + "time.sleep(60)"))
            started.append(child.process.pid)
            raise DemoFailed("x")

    with pytest.raises(DemoFailed):
        await failing_demo()
    assert not _is_alive(started[0])


async def test_a_child_that_ends_early_is_quoted(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        child = await processes.start("one", _python("import sys; sys.exit('no room on the disk')"))
        with pytest.raises(DemoFailed, match="one: ended with status 1: no room on the disk"):
            await processes.ready_event(child, timeout_s=30)


async def test_a_child_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        child = await processes.start("one", _python("import time; time.sleep(60)"))
        with pytest.raises(DemoFailed, match="not ready after 0 s"):
            await processes.ready_event(child, timeout_s=0.1)


async def test_the_redis_server_answers_and_is_ended(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        child, url = await start_redis(processes, tmp_path, max_bytes=32 << 20)
        assert url.startswith("redis://127.0.0.1:")
        assert child.is_running
    assert not child.is_running
