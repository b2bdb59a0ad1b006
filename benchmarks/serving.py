"""32 conversations against two engines that share a store: answers, throughput, waits, and a killed engine.

Each conversation has a system prompt that it shares with seven others, and asks several questions; its turns
alternate between the engines, so that each one goes on with what the other computed. Three parts:

- alone: one request at a time;
- together: all conversations at once, on fresh engines and a fresh store; every greedy answer must be that of
  the part before;
- killed: all at once on the same engines, with other questions; one engine is killed (SIGKILL) while it
  answers. Only the requests it had may fail; their clients ask the other engine again.

A sample of answers is also compared with those of an engine without any reuse. ``--json`` ends with one JSON
object on stdout. The exit status is 1 if an answer differs, a request is lost that should not be, or the
throughput of all at once is not at least three times that of one at a time (``--least-ratio``).
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from kvstore_engine_adapter.demo.processes import Child, Processes, kvstore_command
from kvstore_engine_adapter.demo.texts import load_texts

MODEL_NAME = "served"
_START_S = 300.0
_MAX_MODEL_LEN = 2048
_DRAM_BYTES = 2 << 30

_HARBOUR = (
    "Who was the architect of the lighthouse?",
    "How high is the tower?",
    "What is the colour of the light, and why?",
    "What is the reef called?",
    "Who was the first keeper?",
    "How many steps does the stair have?",
    "What was the quarry of the slate called?",
    "Where did the rotating lens come from?",
    "How many puffins were there in 1880?",
    "Who left the cotton money for the telescope?",
    "What did Ingrid Solheim discover?",
    "What did Samuel Otieno carry up the stair?",
)
_ORCHARD = (
    "When was the cooperative founded?",
    "Who was its first chairman?",
    "How are votes counted?",
    "What saved the cooperative in 1976?",
    "How many floors does the press house have?",
    "Who is the present manager?",
    "What does the Tarrant Russet taste of?",
    "What must a member bring who misses three meetings?",
)
_ANYTHING = (
    "Why is the sky blue?",
    "Give me a recipe for a simple bread.",
    "What is the capital of France, and what is it known for?",
    "How do bees make honey?",
    "Write a short poem about the sea.",
    "What is a prime number? Name three.",
    "How does a lighthouse work?",
    "Name three ways to save water at home.",
    "What is the difference between an apple and a quince?",
    "Tell me a fact about the moon.",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the questions that are asked one after the other."""

    number: int
    system: str
    questions: tuple[str, ...]


@dataclass(slots=True)
class Turn:
    """One answered request. ``gaps_s`` are the times between its pieces of text."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    prompt_tokens: int = 0
    matched_tokens: int = 0
    ttft_s: float = 0.0
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    engine: str = ""


@dataclass(slots=True)
class Engine:
    """An engine, and how many requests it has. One that ``is_gone`` is asked no more."""

    name: str
    url: str
    child: Child
    in_flight: int = 0
    is_gone: bool = False


class Lost(Exception):
    """A request whose engine went away."""


def conversations(count: int, turns: int, first: int) -> list[Conversation]:
    """Return conversations about four system prompts; ``first`` shifts the questions."""
    texts = load_texts()
    half = texts.document.index("\n\n", len(texts.document) // 2)
    subjects = (
        (
            "You are the guide of Brenning Point. Answer in one sentence from this text:\n\n",
            texts.document[:half],
        ),
        ("You tell visitors about Brenning Point. Answer briefly from this text:\n\n", texts.document[half:]),
        ("You answer for the orchard cooperative, from these notes:\n\n", texts.other_document),
        ("You are a helpful assistant. Answer politely and in plain words.", ""),
    )
    asked = (_HARBOUR[:8], _HARBOUR[4:], _ORCHARD, _ANYTHING)
    made = []
    for number in range(count):
        subject = number % len(subjects)
        start = first + number // len(subjects)
        pool = asked[subject]
        questions = tuple(pool[(start + 3 * turn) % len(pool)] for turn in range(turns))
        made.append(Conversation(number, "".join(subjects[subject]), questions))
    return made


async def ask(
    http: aiohttp.ClientSession, engine: Engine, messages: Sequence[dict[str, str]], max_tokens: int
) -> Turn:
    """Return the streamed greedy answer.

    Raises:
        Lost: the engine went away.
    """
    body = {
        "model": MODEL_NAME, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens,
        "stream": True, "kvstore": {"output_tokens": True},
    }  # fmt: skip
    turn = Turn(engine=engine.name)
    started_s = last_s = time.monotonic()
    engine.in_flight += 1
    try:
        async with http.post(f"{engine.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"{engine.name}: {response.status}: {(await response.text())[:300]}")
            async for event in events(response):
                now_s = time.monotonic()
                choice = event["choices"][0]
                if choice["delta"].get("content"):
                    turn.text += choice["delta"]["content"]
                    if not turn.ttft_s:
                        turn.ttft_s = now_s - started_s
                    else:
                        turn.gaps_s.append(now_s - last_s)
                    last_s = now_s
                if "kvstore" in event:
                    about = event["kvstore"]
                    turn.tokens = tuple(about["output_tokens"])
                    turn.prompt_tokens, turn.matched_tokens = about["prompt_tokens"], about["matched_tokens"]
    except aiohttp.ClientError as error:
        raise Lost(str(error)) from error
    finally:
        engine.in_flight -= 1
    if not turn.tokens:
        raise Lost("the stream ended early")
    turn.seconds = time.monotonic() - started_s
    return turn


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:  # type: ignore[type-arg]
    """Yield the events of a stream of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                raise Lost(str(event["error"]))
            yield event


class Client:
    """Asks conversations; a turn whose engine goes away is asked again of another one."""

    def __init__(self, http: aiohttp.ClientSession, engines: Sequence[Engine], max_tokens: int) -> None:
        self._http = http
        self._engines = list(engines)
        self._max_tokens = max_tokens
        self.lost: list[str] = []
        self.turns_done = 0

    async def hold(self, conversation: Conversation) -> list[Turn]:
        """Ask the questions one after the other; turns alternate between the engines."""
        messages = [{"role": "system", "content": conversation.system}]
        turns: list[Turn] = []
        for index, question in enumerate(conversation.questions):
            messages.append({"role": "user", "content": question})
            turn = await self._ask(messages, conversation.number + index)
            messages.append({"role": "assistant", "content": turn.text})
            turns.append(turn)
            self.turns_done += 1
        return turns

    async def _ask(self, messages: Sequence[dict[str, str]], place: int) -> Turn:
        while True:
            alive = [engine for engine in self._engines if not engine.is_gone]
            engine = alive[place % len(alive)]
            try:
                return await ask(self._http, engine, messages, self._max_tokens)
            except Lost:
                self.lost.append(engine.name)
                await asyncio.sleep(0.1)


class Setup:
    """A store and engines, in processes of their own."""

    def __init__(self, processes: Processes, folder: Path, model: Path) -> None:
        self._processes = processes
        self._folder = folder
        self._model = model

    async def store(self, name: str) -> str:
        """Start a store; returns its address."""
        socket = self._folder / f"{name}.sock"
        config = self._folder / f"{name}.toml"
        config.write_text(
            f'[server]\nsocket = "{socket}"\n[tiers.dram]\ncapacity_bytes = {_DRAM_BYTES}\n'
            f"staging_bytes = {64 << 20}\n"
        )
        child = await self._processes.start(name, kvstore_command("serve", "--config", str(config), "--json"))
        await self._processes.ready_event(child, timeout_s=_START_S)
        return str(socket)

    async def engine(self, name: str, store: str | None) -> Engine:
        """Start an engine."""
        command = kvstore_command(
            "engine", "--model", str(self._model), "--port", "0", "--served-model-name", MODEL_NAME,
            "--max-model-len", str(_MAX_MODEL_LEN), "--num-blocks", "2048",
            *(["--store", store] if store else ["--no-reuse"]),
        )  # fmt: skip
        child = await self._processes.start(name, command)
        event = await self._processes.ready_event(child, timeout_s=_START_S)
        return Engine(name, str(event["url"]).rstrip("/"), child)

    async def stop(self, *children: Child) -> None:
        """End processes and wait for them."""
        await asyncio.gather(*(self._processes.stop(child) for child in children))


def cpu_seconds(engines: Sequence[Engine]) -> float:
    """Return the processor time that engines have used."""
    ticks = 0
    for engine in engines:
        fields = Path(f"/proc/{engine.child.process.pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def figures(turns: Sequence[Turn], wall_s: float, cpu_s: float) -> dict[str, object]:
    """Return what a part came to."""
    output = sum(len(turn.tokens) for turn in turns)
    prompt = sum(turn.prompt_tokens for turn in turns)
    gaps = [gap for turn in turns for gap in turn.gaps_s] or [0.0]
    ttft = [turn.ttft_s for turn in turns]
    seconds = [turn.seconds for turn in turns]
    return {
        "requests": len(turns),
        "wall_s": round(wall_s, 2),
        "engines_cpu_s": round(cpu_s, 2),
        "output_tokens": output,
        "output_tokens_per_s": round(output / wall_s, 1),
        "output_tokens_per_cpu_s": round(output / cpu_s, 1),
        "reused_ratio": round(sum(turn.matched_tokens for turn in turns) / prompt, 3),
        "ttft_s": _percentiles(ttft),
        "inter_token_s": _percentiles(gaps),
        "request_s": _percentiles(seconds),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "max": round(max(values), 4)}


@dataclass(slots=True)
class Part:
    """Turns of all conversations, and what they came to."""

    turns: list[list[Turn]]
    figures: dict[str, object]


async def held(
    client: Client, talks: Sequence[Conversation], engines: Sequence[Engine], *, together: bool
) -> Part:
    """Hold conversations, all at once or one after the other."""
    cpu_s, started_s = cpu_seconds(engines), time.monotonic()
    if together:
        turns = list(await asyncio.gather(*map(client.hold, talks)))
    else:
        turns = [await client.hold(talk) for talk in talks]
    wall_s = time.monotonic() - started_s
    flat = [turn for each in turns for turn in each]
    return Part(turns, figures(flat, wall_s, cpu_seconds(engines) - cpu_s))


async def killed(
    http: aiohttp.ClientSession, engines: Sequence[Engine], talks: Sequence[Conversation], max_tokens: int
) -> tuple[list[list[Turn]], dict[str, object]]:
    """Hold conversations at once, and kill the second engine when a quarter of the turns is done."""
    client, victim = Client(http, engines, max_tokens), engines[1]
    holding = [asyncio.create_task(client.hold(talk)) for talk in talks]
    total = sum(len(talk.questions) for talk in talks)
    while client.turns_done < total // 4 or not victim.in_flight:  # noqa: ASYNC110  a condition of two
        await asyncio.sleep(0.01)
    in_flight, victim.is_gone = victim.in_flight, True
    victim.child.process.kill()
    await victim.child.process.wait()
    turns = list(await asyncio.gather(*holding))
    return turns, {
        "in_flight_at_the_kill": in_flight,
        "lost_by_the_killed": client.lost.count(victim.name),
        "lost_by_the_other": len(client.lost) - client.lost.count(victim.name),
    }


def differing(first: Sequence[Sequence[Turn]], second: Sequence[Sequence[Turn]]) -> int:
    """Return how many answers differ."""
    pairs = ((a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    return sum(a.tokens != b.tokens for a, b in pairs)


async def measure(args: argparse.Namespace, folder: Path, say: "Say") -> dict[str, object]:
    """Run all parts."""
    talks = conversations(args.conversations, args.turns, 0)
    others = conversations(args.conversations, args.turns, 1)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with contextlib.AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(folder))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        setup = Setup(processes, folder, args.model)

        async def two_engines(name: str) -> list[Engine]:
            store = await setup.store(f"{name}-store")
            return [await setup.engine(f"{name}-{which}", store) for which in "ab"]

        engines = await two_engines("alone")
        say("alone: one request at a time")
        alone = await held(Client(http, engines, args.answer_tokens), talks, engines, together=False)
        wanted = await held(Client(http, engines, args.answer_tokens), others, engines, together=False)
        await setup.stop(*(engine.child for engine in engines))
        say(f"alone: {alone.figures}")

        cold = await setup.engine("cold", None)
        sample = talks[:: max(1, len(talks) // args.cold)][: args.cold]
        without = await held(Client(http, [cold], args.answer_tokens), sample, [cold], together=False)
        cold_differing = differing([alone.turns[talk.number] for talk in sample], without.turns)
        await setup.stop(cold.child)
        say(f"without reuse: {cold_differing} of {sum(map(len, without.turns))} answers differ")

        engines = await two_engines("together")
        together = await held(Client(http, engines, args.answer_tokens), talks, engines, together=True)
        say(f"together: {together.figures}")
        turns, kill = await killed(http, engines, others, args.answer_tokens)
        say(f"killed: {kill}")
    return {
        "conversations": args.conversations,
        "turns": args.turns,
        "alone": alone.figures,
        "together": together.figures,
        "throughput_ratio": round(_ratio(together, alone, "output_tokens_per_s"), 2),
        "throughput_ratio_per_cpu_s": round(_ratio(together, alone, "output_tokens_per_cpu_s"), 2),
        "answers_differing": differing(alone.turns, together.turns),
        "answers_differing_from_cold": cold_differing,
        "killed": kill | {"answers_differing": differing(wanted.turns, turns)},
    }


def _ratio(part: Part, other: Part, name: str) -> float:
    return float(str(part.figures[name])) / float(str(other.figures[name]))


class Say:
    """Progress, on standard error."""

    def __call__(self, text: str) -> None:
        """Print a line."""
        print(f"serving: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="GGUF or model folder (default: the demo's model)")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--cold", type=int, default=4, help="conversations repeated without any reuse")
    parser.add_argument(
        "--least-ratio", type=float, default=3.0, help="throughput together by alone that must be reached"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.model is None:
        from kvstore.config import cache_folder
        from kvstore_engine_adapter.model_fetch import fetch_model

        args.model = fetch_model(cache_folder() / "models", say=Say())
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        report = asyncio.run(measure(args, Path(name), Say()))
    kill = report["killed"]
    assert isinstance(kill, dict)
    is_lost = kill["lost_by_the_other"] or kill["lost_by_the_killed"] > kill["in_flight_at_the_kill"]
    is_wrong = (
        report["answers_differing"] or report["answers_differing_from_cold"] or kill["answers_differing"]
    )
    is_slow = float(str(report["throughput_ratio"])) < args.least_ratio
    print(json.dumps(report) if args.json else json.dumps(report, indent=2))
    return 1 if is_lost or is_wrong or is_slow else 0


if __name__ == "__main__":
    sys.exit(main())
