"""README's examples run as they stand: each Python one on its own, the console ones in order."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

README = Path(__file__).parents[2] / "README.md"

# What needs the model, the network, minutes, or another test: the set-up scripts and the engine.
NOT_RUN = ("scripts/", "MODEL=", ".venv/bin/kvstore engine", ".venv/bin/kvstore drill", "curl ")

pytestmark = pytest.mark.skipif(not README.exists(), reason="README.md is only in the checkout")


class Example(NamedTuple):
    """A command line of a console example, and the output that is shown under it."""

    command: str
    output: str


def blocks(language: str) -> list[str]:
    if not README.exists():
        return []
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def console_examples() -> list[Example]:
    examples: list[Example] = []
    for line in "".join(blocks("console")).splitlines(keepends=True):
        if line.startswith("$ "):
            examples.append(Example(line[2:], ""))
        elif line.startswith("> "):
            examples[-1] = Example(examples[-1].command + line[2:], "")
        else:
            examples[-1] = Example(examples[-1].command, examples[-1].output + line)
    return [example for example in examples if not example.command.startswith(NOT_RUN)]


class Shell:
    """A shell with a home of its own, whose ``.venv`` is the environment of these tests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process = subprocess.Popen(
            ["bash"],
            cwd=home,
            env={"HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def tell(self, command: str) -> str:
        """Run a command and return what it printed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\necho 'the end of it'\n")
        self.process.stdin.flush()
        return "".join(iter(self.line, "the end of it\n"))

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the shell ended"
        return line

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("readme")
    (home / ".venv").symlink_to(Path(sys.prefix))
    return home


@pytest.fixture
def terminals(home: Path) -> Iterator[list[Shell]]:
    """Two terminals: in the first a server may be running until the end."""
    shells = [Shell(home), Shell(home)]
    yield shells
    for shell in reversed(shells):
        shell.end()


def serve(shell: Shell, command: str) -> str:
    """Start a server that ends with its shell's input, and return what it says when it is ready."""
    assert shell.process.stdin is not None
    shell.process.stdin.write(f"{command.strip()} 2> log & pid=$!; cat > /dev/null; kill $pid; wait $pid\n")
    shell.process.stdin.flush()
    return shell.line()


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[-1].strip())
def test_a_python_example_runs_on_its_own(code: str, home: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        cwd=home,
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_console_examples_print_what_is_shown(terminals: list[Shell], home: Path) -> None:
    serving, asking = terminals
    examples = console_examples()

    printed = [
        serve(serving, command) if " serve " in command else asking.tell(command) for command, _ in examples
    ]

    shown = [output.replace("/home/you", str(home)) for _, output in examples]
    assert list(zip([command for command, _ in examples], printed, strict=True)) == list(
        zip([command for command, _ in examples], shown, strict=True)
    )
    assert len(examples) > 15


def test_the_toml_example_is_a_valid_addition(home: Path) -> None:
    addition = home / "remote.toml"
    addition.write_text("".join(blocks("toml")))
    command = [sys.executable, "-m", "kvstore.cli", "config", "--config", str(addition)]

    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)", README.read_text(encoding="utf-8"))

    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
