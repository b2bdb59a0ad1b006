"""The commands of docs/security.md print what is shown, with the configurations that stand before them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.drill.redis_server import free_port
from tests.http.guarded_process import GuardedProcess, GuardedSettings

PAGE = Path(__file__).parents[2] / "docs" / "security.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not beside the tests")


class PageSettings(GuardedSettings):
    """The configuration of a page, with a store small enough for a test."""

    def toml(self, socket_path):
        small = '[tiers.dram]\ncapacity_bytes = "1MiB"\nstaging_bytes = 0\n'
        return f'[server]\nsocket = "{socket_path}"\n{small}{self.more}'


class Page:
    """Goes through the blocks of a page in order; a server runs with the configuration shown last."""

    def __init__(self, home):
        self.home = home
        self.port = free_port()
        self.config = None
        self.server = None

    def fitted(self, text):
        return text.replace("/etc/kvstore", str(self.home / "etc")).replace("8470", str(self.port))

    def take(self, language, text):
        if language == "toml":
            self.end()
            self.config = self.fitted(text)
            return []
        steps = re.findall(r"^\$ ((?:.*\n)(?:> .*\n)*)((?:(?!\$ ).*\n)*)", text, re.M)
        return [
            (command, self.run(command), self.fitted(shown))
            for command, shown in ((step[0].replace("\n> ", "\n"), step[1]) for step in steps)
        ]

    def run(self, command):
        if "curl" in command and self.server is None:
            self.server = GuardedProcess(self.home, {})
            self.server.settings = PageSettings(more=self.config)
            self.server.start()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", f"umask 077; {self.fitted(command)}"],
            cwd=self.home,
            env={"PATH": path, "HOME": str(self.home), "LC_ALL": "C"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout if done.stdout.endswith("\n") or not done.stdout else done.stdout + "\n"

    def end(self):
        if self.server is not None:
            self.server.kill()
            self.server = None


@pytest.fixture
def page(tmp_path):
    made = Page(tmp_path)
    yield made
    made.end()


def test_the_commands_print_what_is_shown(page):
    blocks = re.findall(r"^```(toml|console)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)

    steps = [step for language, text in blocks for step in page.take(language, text)]

    assert len(steps) >= 11
    assert [(command, printed) for command, printed, _ in steps] == [
        (command, shown) for command, _, shown in steps
    ]
