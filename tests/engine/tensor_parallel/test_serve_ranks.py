"""``kvstore engine --tensor-parallel-size``: answers, signals, and exit status when a rank is lost."""

import os
import signal
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.drill.store_process import wait_until
from tests.engine.engine_process import engine
from tests.store_process import StoreProcess

LONG_S = 100.0


def followers(process):
    """The processes that an engine has started."""
    pid = process.child.pid
    found = [Path(f"/proc/{pid}/task/{task.name}/children") for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(number) for path in found for number in path.read_text().split()]


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z")


def assert_ended(pids):
    assert wait_until(lambda: all(map(has_ended, pids)), LONG_S)


def two_ranks(model, *options):
    return engine(model, "--tensor-parallel-size", 2, *options)


def test_two_ranks_serve_and_end_with_0_and_a_second_replica_reuses_their_blocks(shared_gguf, tmp_path):
    with StoreProcess(tmp_path) as store:
        with two_ranks(shared_gguf, "--store", store.socket_path) as process:
            wanted = process.ask()
            pids = followers(process)
            assert len(pids) == 1
            assert process.stop() == (0, "")
            assert_ended(pids)
        with two_ranks(shared_gguf, "--store", store.socket_path) as process:
            found = process.ask()
    assert found["tiers"].keys() == {"dram"}
    assert found["matched_tokens"] == found["prompt_tokens"] // 16 * 16
    assert found["output_tokens"] == wanted["output_tokens"]


def test_a_follower_that_is_killed_ends_the_engine_with_its_name_and_status_1(shared_gguf):
    with two_ranks(shared_gguf) as process:
        process.ask()
        (follower,) = followers(process)
        os.kill(follower, signal.SIGKILL)
        _, errors = process.child.communicate(timeout=LONG_S)
        assert process.child.returncode == 1
        assert f"kvstore: engine: rank 1 (process {follower}) was killed by SIGKILL" in errors


def test_a_request_under_way_gets_status_503_when_a_follower_is_killed(shared_gguf):
    with two_ranks(shared_gguf) as process:
        (follower,) = followers(process)
        # Stopped first, so that the request is under way for as long as it takes to kill it.
        os.kill(follower, signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            asking = threads.submit(process.ask)
            assert wait_until(lambda: process.stats()["running_requests"] == 1, LONG_S)
            os.kill(follower, signal.SIGKILL)
            with pytest.raises(urllib.error.HTTPError) as refusal:
                asking.result(LONG_S)
        with refusal.value as answer:
            assert answer.status == 503


def test_followers_end_with_an_engine_that_is_killed(shared_gguf):
    with two_ranks(shared_gguf) as process:
        pids = followers(process)
        process.kill()
        assert_ended(pids)
