"""ReplicaProcess: an engine in a process of its own, as a test sees it; here of vLLM."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "CUDA_VISIBLE_DEVICES": "",
}


PATIENT = {"lookup_deadline_ms": 20_000, "load_deadline_ms": 20_000}
"""Deadlines for scenarios that judge what is reused: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one batch of prompts got. ``calls_s`` and ``waits_s``: of engines that are ``watched``."""

    seconds: float
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    finish: list[str]
    preemptions: float | None
    external: float | None
    left: dict[str, int] | None = None
    cpu_s: float = 0.0
    calls_s: dict[str, float] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)


def engine_python() -> Path:
    """Return the engines' own Python."""
    return Path(os.environ.get("KVSTORE_ENGINES_VENV", ROOT / ".venv-engines")) / "bin" / "python"


def engine_environ(*, in_process: bool = True, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of an engine's process."""
    paths = [str(ROOT), str(ROOT / "engine_adapter")]
    return {
        **os.environ,
        **ENVIRON,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **(more or {}),
    }


def transfer_config(store: str, **options: object) -> dict[str, object]:
    """Return vLLM's ``kv_transfer_config`` with this connector, which loads whatever is there."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_engine_adapter.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "loads": "always", **options},
    }


class ReplicaProcess:
    """An engine that is started when it is entered; its log goes to ``log``."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        transfer: Mapping[str, object] | None = None,
        in_process: bool = True,
        environ: Mapping[str, str] | None = None,
        **arguments: object,
    ) -> None:
        self.log = log
        self._arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "enforce_eager": True,
            "max_model_len": 1024,
            "disable_log_stats": False,
            **arguments,
        }
        if transfer is not None:
            self._arguments["kv_transfer_config"] = dict(transfer)
        self._begin_as(engine_environ(in_process=in_process, more=environ))

    def _begin_as(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def __enter__(self) -> Self:
        self.launch()
        try:
            self.wait_ready()
        except BaseException:
            self._kill()
            raise
        return self

    def command(self) -> list[str]:
        """Return what runs the engine."""
        return [str(engine_python()), str(Path(__file__).with_name("vllm_replica.py"))]

    def launch(self) -> None:
        """Start it."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                cwd=self.log.parent,
                start_new_session=True,
            )
        self._tell(self._arguments)

    def wait_ready(self, *, patience_s: float = 900.0) -> None:
        """Wait until it takes prompts."""
        self.ready_s = self._hear(patience_s)["ready_s"]

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, prompts: Sequence[Sequence[int]], **asked: object) -> Answer:
        """Have it answer prompts, greedily, as one batch."""
        self.begin(prompts, **asked)
        return self.finish()

    def begin(self, prompts: Sequence[Sequence[int]], **asked: object) -> None:
        """Send prompts."""
        self._tell({"prompts": [list(one) for one in prompts], "max_tokens": 40, "logprobs": 1, **asked})

    def finish(self, *, patience_s: float = 600.0) -> Answer:
        """Wait for the answer to the prompts that were sent."""
        return Answer(**self._hear(patience_s))

    def _tell(self, value: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self, patience_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        until_s = time.monotonic() + patience_s
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            more = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not more:
                raise RuntimeError(f"engine: no answer (status {self._process.poll()}): {self.last_words()}")
            line += more
        found: dict[str, Any] = json.loads(line)
        return found

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:]
