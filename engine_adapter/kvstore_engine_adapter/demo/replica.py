"""One inference replica as the demo sees it: a process that answers chat requests over HTTP."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt

from kvstore_engine_adapter.demo.processes import Child, DemoFailed, Processes, kvstore_command

MODEL_NAME = "demo"
_START_S = 120.0
_ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a replica answered, and where its prefix came from.

    ``tiers`` counts the reused tokens by the tier they came from. ``first_logits`` are those of the first
    generated token: ``[vocabulary]``, float32.
    """

    text: str
    output_tokens: tuple[int, ...]
    prompt_tokens: int
    matched_tokens: int
    tiers: Mapping[str, int]
    miss_reason: str | None
    load_s: float
    prefill_s: float
    ttft_s: float
    first_logits: npt.NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Replica:
    """A running engine."""

    name: str
    child: Child
    url: str

    async def ask(self, http: aiohttp.ClientSession, prompt: str, *, max_tokens: int) -> Answer:
        """Ask for a greedy answer.

        Raises:
            DemoFailed: the engine refused, died, or answered something else.
        """
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "kvstore": {"first_logits": True},
        }
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with http.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise DemoFailed(f"{self.name}: refused with status {response.status}: {text}")
                return _answer(await response.json())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoFailed(
                f"{self.name}: no answer: {error or type(error).__name__}: {self.child.last_words()}"
            ) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DemoFailed(f"{self.name}: an answer the demo does not understand: {error!r}") from error


async def start_replica(processes: Processes, name: str, *, model: Path, store: str | None) -> Replica:
    """Start an engine and wait until it answers. ``store`` is a store's address; None: without any reuse.

    Raises:
        DemoFailed: it does not start.
    """
    command = kvstore_command(
        "engine", "--model", str(model), "--port", "0", "--served-model-name", MODEL_NAME
    )
    command += ["--store", store] if store else ["--no-reuse"]
    child = await processes.start(name, command)
    event = await processes.ready_event(child, timeout_s=_START_S)
    return Replica(name, child, str(event["url"]).rstrip("/"))


def _answer(body: dict[str, object]) -> Answer:
    choices, report = body["choices"], body["kvstore"]
    if not isinstance(choices, list) or not isinstance(report, dict):
        raise TypeError("choices or kvstore are missing")
    try:
        logits = np.frombuffer(base64.b64decode(report["first_logits"], validate=True), dtype="<f4")
    except binascii.Error as error:
        raise ValueError("first_logits is not base64") from error
    return Answer(
        text=str(choices[0]["message"]["content"]),
        output_tokens=tuple(int(token) for token in report.get("output_tokens", ())),
        prompt_tokens=int(report["prompt_tokens"]),
        matched_tokens=int(report["matched_tokens"]),
        tiers={str(name): int(count) for name, count in report["tiers"].items()},
        miss_reason=report["miss_reason"],
        load_s=float(report["load_s"]),
        prefill_s=float(report["prefill_s"]),
        ttft_s=float(report["ttft_s"]),
        first_logits=logits,
    )
