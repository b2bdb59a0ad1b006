"""A real Prometheus for tests: its binaries, wherever they are, and a server on a free port."""

import json
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

from kvstore.drill.store_process import guarded, wait_until
from tests.metrics.scrape import read
from tests.redis_server import free_port

FILES = Path(__file__).parents[2] / "helm" / "kvstore" / "files"
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def binary(name):
    """Return the path of Prometheus' program of that name; None if it is not installed."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=beside)


def obstacle():
    """Say why these tests cannot run; empty if they can."""
    if not FILES.is_dir():
        return "helm/ is not beside the tests"
    missing = [name for name in ("promtool", "prometheus") if binary(name) is None]
    return f"no {missing[0]}: apt-get install prometheus, or scripts/test-tools" if missing else ""


class Prometheus:
    """A server that scrapes ``port`` every second and evaluates the rules; ended with its block."""

    def __init__(self, folder, port):
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder, self._port = folder, port

    def __enter__(self):
        config = self._folder / "prometheus.yml"
        config.write_text(
            "global: { scrape_interval: 1s, evaluation_interval: 1s }\n"
            f"rule_files: [{FILES / 'rules.yaml'}]\n"
            "scrape_configs:\n"
            f"  - {{ job_name: kvstore, static_configs: [{{ targets: ['127.0.0.1:{self._port}'] }}] }}\n"
        )
        words = [f"--config.file={config}", f"--storage.tsdb.path={self._folder / 'data'}"]
        words.append(f"--web.listen-address={self.url.removeprefix('http://')}")
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                guarded([binary("prometheus"), *words]), stdout=log, stderr=log, cwd=self._folder
            )
        assert wait_until(lambda: read(f"{self.url}/-/ready") is not None, 60, pause_s=0.1)
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait(timeout=30)

    def ask(self, path, **query):
        """Return what its API answers; an assertion fails if it is an error."""
        answer = json.loads(read(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression):
        """Return the series that an expression has now."""
        return self.ask("query", query=expression)["result"]
