"""ServerProcess: vLLM's OpenAI-style server in a process group of its own."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.engines.replica_process import engine_environ, engine_python


class ServerProcess:
    """A server that is started when it is entered; its log goes to ``log``; ``more`` are arguments."""

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, object] | None,
        *more: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = environ or {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = log
        self._command = [
            str(engine_python()),
            *(
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(model),
                "--served-model-name",
                "tiny",
            ),
            *("--dtype", "float32", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--enforce-eager", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(self._port)),
        ]
        if transfer is not None:
            self._command += ["--kv-transfer-config", json.dumps(transfer)]
        self._command += more
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environ = engine_environ(in_process=False, more={"VLLM_SERVER_DEV_MODE": "1", **self._environ})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=environ,
                cwd=self._log.parent,
                start_new_session=True,
            )
        until_s = time.monotonic() + 600
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return self
        self.__exit__()
        raise RuntimeError(f"server: did not start: {self._log.read_text(errors='replace')[-3000:]}")

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def get(self, path: str) -> str:
        """Return what a path has."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def complete(
        self, prompt: Sequence[int], *, headers: Mapping[str, str] | None = None, **more: object
    ) -> dict[str, Any]:
        """Return the answer to a prompt, computed greedily."""
        asked = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": 40,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        return dict(json.loads(self._post("/v1/completions", asked, headers or {})))

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._post("/reset_prefix_cache", {}, {})

    def counter(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = [
            line for line in self.get("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _post(self, path: str, value: object, headers: Mapping[str, str]) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(value).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return bytes(answer.read())
