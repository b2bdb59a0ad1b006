"""What the scenarios of real engines share: prompts, models, references without a connector, results."""

import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.engines.replica_process import Answer, ReplicaProcess, engine_environ, engine_python
from tests.store_process import StoreProcess

BLOCK = 32
TOLERANCE = 1e-3
"""Of log-probabilities: 0 was seen between runs with as many threads, 1.6e-5 with others."""


@dataclass(slots=True)
class Outcome:
    """What a scenario came to. ``problems`` is empty if it went as it must."""

    engine: str
    scenario: str
    outputs_equal: bool = True
    external_tokens: float = 0
    seconds: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def compare(self, got: Answer, wanted: Answer, *, what: str = "") -> None:
        """Demand that an answer is that of a run without a connector."""
        self.seconds += got.seconds
        if got.tokens != wanted.tokens:
            self.outputs_equal = False
            self.problems.append(f"{what}: other tokens than without a connector")
        largest = max(
            (
                abs(a - b)
                for one, other in zip(got.logprobs, wanted.logprobs, strict=True)
                for a, b in zip(one, other, strict=True)
            ),
            default=0.0,
        )
        if largest > TOLERANCE:
            self.outputs_equal = False
            self.problems.append(f"{what}: log-probabilities differ by {largest:.2g}")
        if got.left is not None and any(got.left.values()):
            self.problems.append(f"{what}: the scheduler still holds {got.left}")
        if set(got.finish) != {"length"}:
            self.problems.append(f"{what}: requests ended with {sorted(set(got.finish))}")

    def demand(self, is_so: bool, text: str) -> None:
        """Note a problem unless something is so."""
        if not is_so:
            self.problems.append(text)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready form."""
        return {
            "engine": self.engine,
            "scenario": self.scenario,
            "outputs_equal": self.outputs_equal,
            "external_tokens": self.external_tokens,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
            "problems": self.problems,
        }


def tokens(seed: int, count: int) -> list[int]:
    """Return random tokens, none of them special."""
    source = random.Random(seed)
    return [source.randrange(4, 512) for _ in range(count)]


def batches(seed: int) -> list[list[list[int]]]:
    """Return batches of prompts with shared prefixes: of 300, then of 290, 330, 100 and 64 tokens."""
    first = tokens(seed, 300)
    return [[first], [first[:290], first + tokens(seed + 1, 30), first[:100], first[:64]]]


class Workshop:
    """A folder with models and logs, and the answers of runs without a connector."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, Path] = {}
        self._references: dict[str, list[Answer]] = {}
        self._num_logs = 0

    def python(self) -> Path:
        """Return the engine's own Python."""
        return engine_python()

    def model(self, name: str = "llama", *, seed: int = 1) -> Path:
        """Return the folder of a small random model, made when it is first asked for."""
        key = f"{name}-{seed}"
        if key not in self._models:
            path = self.folder / key
            script = Path(__file__).with_name("tiny_model.py")
            command = [str(self.python()), str(script), str(path), str(seed), name]
            subprocess.run(command, check=True, env=engine_environ(), capture_output=True)
            self._models[key] = path
        return self._models[key]

    def log(self, name: str) -> Path:
        """Return the path of a new log."""
        self._num_logs += 1
        return self.folder / f"{self._num_logs:02d}-{name}.log"

    def store(self, name: str, *, dram_bytes: int = 64 << 20) -> StoreProcess:
        """Return a store that is not started."""
        folder = self.folder / name
        folder.mkdir()
        return StoreProcess(folder, dram_bytes=dram_bytes)

    def replica(self, name: str, *, model: Path | None = None, **arguments: object) -> ReplicaProcess:
        """Return an engine that is not started."""
        return ReplicaProcess(model or self.model(), self.log(name), **arguments)  # type: ignore[arg-type]

    def reference(
        self, key: str, asked: Callable[[], Sequence[Sequence[Sequence[int]]]], **arguments: object
    ) -> list[Answer]:
        """Return what an engine without a connector answers to batches, asked once for each ``key``."""
        if key not in self._references:
            with self.replica(f"reference-{key}", **arguments) as replica:
                self._references[key] = [replica.ask(batch) for batch in asked()]
        return self._references[key]
