"""The demo's scenario: who is started and asked what, in which order, and what came of it."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvstore.errors import PromptTooLong
from kvstore_engine_adapter.demo.expectations import Trial, broken_of_tier, broken_with_redis_stopped
from kvstore_engine_adapter.demo.processes import Child, DemoFailed, Processes
from kvstore_engine_adapter.demo.prompt_tokens import PromptTokens
from kvstore_engine_adapter.demo.redis_server import start_redis
from kvstore_engine_adapter.demo.replica import Answer, Replica, start_replica
from kvstore_engine_adapter.demo.store_node import StoreNode
from kvstore_engine_adapter.demo.texts import MIN_TOKENS, NUM_QUESTIONS, DemoTexts

_REDIS_BYTES = 256 << 20
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What to run the demo with."""

    model: Path
    texts: DemoTexts
    keep: bool = False


@dataclass(slots=True)
class DemoReport:
    """What the demo measured, and which expectations did not hold."""

    model: str
    document_tokens: int
    trials: dict[str, Trial] = field(default_factory=dict)
    first_cold: Answer | None = None
    redis_stopped: Trial | None = None
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether everything was tried and every expectation held."""
        return not self.broken and len(self.trials) == 4 and self.redis_stopped is not None

    def to_json(self) -> dict[str, object]:
        """Return the report ready for JSON; each tier's trial stands under the tier's name."""
        return {
            "ok": self.is_ok,
            "model": self.model,
            "document_tokens": self.document_tokens,
            **{tier: trial.to_json() for tier, trial in self.trials.items()},
            "redis_stopped": self.redis_stopped.to_json() if self.redis_stopped else None,
            "broken": self.broken,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class PreparedDemo:
    """Settings that were looked at: the model has a tokenizer, the document is long enough."""

    settings: DemoSettings
    tokens: PromptTokens
    document_tokens: int


def prepare_demo(settings: DemoSettings) -> PreparedDemo:
    """Look at the model and the document; nothing is started. Blocks.

    Raises:
        UnsupportedModel: the model is not there, damaged, or of a kind that cannot be run.
        DemoFailed: the document is too short, or too long for the model with a question and the answer.
        InvalidRequest: the model has no chat template.
    """
    tokens = PromptTokens(settings.model)
    count = tokens.count_text(settings.texts.document)
    if count < MIN_TOKENS:
        raise DemoFailed(f"document: {count} tokens, expected {MIN_TOKENS} or more: name a longer text")
    _refuse_longer_than_context(settings.texts, tokens)
    return PreparedDemo(settings, tokens, count)


def _refuse_longer_than_context(texts: DemoTexts, tokens: PromptTokens) -> None:
    prompts = [texts.prompt(index) for index in range(NUM_QUESTIONS)]
    try:
        longest = max(map(tokens.count_chat, [*prompts, texts.other_prompt()]))
    except PromptTooLong as error:
        raise DemoFailed(f"document: {error}") from error
    most = tokens.context_tokens - _ANSWER_TOKENS
    if longest > most:
        raise DemoFailed(
            f"document: {longest} tokens with a question, the model takes {most} before an answer of "
            f"{_ANSWER_TOKENS}: name a shorter text"
        )


async def run_demo(prepared: PreparedDemo, say: Callable[[str], None]) -> DemoReport:
    """Run the whole scenario; ``say`` gets progress lines. Ends all it started, also when cancelled.

    A part that does not start, dies, or gives no usable answer ends the scenario and is in the report.
    """
    report = DemoReport(prepared.settings.model.name, prepared.document_tokens)
    started = time.monotonic()
    try:
        async with (
            _work_folder(prepared.settings.keep, say) as folder,
            Processes(folder) as processes,
            aiohttp.ClientSession() as http,
        ):
            await _Scenario(prepared, folder, processes, http, report, say).run()
    except DemoFailed as error:
        report.broken.append(str(error))
    report.seconds = time.monotonic() - started
    return report


@contextlib.asynccontextmanager
async def _work_folder(keep: bool, say: Callable[[str], None]) -> AsyncIterator[Path]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="kvstore-demo-"))
    try:
        yield folder
    finally:
        if keep:
            say(f"configurations and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Scenario:
    prepared: PreparedDemo
    folder: Path
    processes: Processes
    http: aiohttp.ClientSession
    report: DemoReport
    say: Callable[[str], None]

    async def run(self) -> None:
        """Go through the steps in order. At most three engines are alive at a time."""
        redis_folder, node1, node2 = self._folder("redis"), self._folder("node1"), self._folder("node2")
        self.say("starting a Redis-protocol server, node 1's store, replica A, and a replica without a store")
        redis, url = await start_redis(self.processes, redis_folder, max_bytes=_REDIS_BYTES)
        store1 = StoreNode("store1", node1, url, has_ssd=True)
        store2 = StoreNode("store2", node2, url, has_ssd=False)
        await store1.start(self.processes)
        reference, replica_a = await asyncio.gather(
            self._replica("reference", None), self._replica("replica-a", store1)
        )
        await self._fill(replica_a, reference, store1)
        await self._end(replica_a)

        replica_b = await self._replica("replica-b", store1)
        await self._trial("dram", replica_b, reference, question=2)
        await self._end(replica_b)

        await self._restart(store1)
        replica_b = await self._replica("replica-b2", store1)
        await self._trial("ssd", replica_b, reference, question=3)
        await self._end(replica_b)

        self.say("starting node 2's store and replica C")
        await store2.start(self.processes)
        replica_c = await self._replica("replica-c", store2)
        await self._trial("remote", replica_c, reference, question=4)
        await self._redis_stopped(redis, replica_c, reference)

    async def _fill(self, replica: Replica, reference: Replica, store: StoreNode) -> None:
        """Have replica A compute both texts, and show its own second question to be a vram hit."""
        texts = self.prepared.settings.texts
        self.say(f"A answers question 1 about a text of {self.report.document_tokens} tokens, nothing stored")
        first = await self._ask(replica, texts.prompt(0))
        self.report.first_cold = first
        self.say(f"   {first.ttft_s:.2f} s to the first token: {first.text.strip()}")
        await self._trial("vram", replica, reference, question=1)
        self.say("A answers a question about another text, for the last step")
        await self._ask(replica, texts.other_prompt())
        await store.settle()

    async def _restart(self, store: StoreNode) -> None:
        assert store.child is not None
        self.say("killing node 1's store (kill -9) and starting it again on the same folder")
        await self.processes.kill(store.child)
        await store.start(self.processes)

    async def _redis_stopped(self, redis: Child, replica: Replica, reference: Replica) -> None:
        texts = self.prepared.settings.texts
        self.say("stopping Redis (SIGSTOP); C answers about the other text, which only Redis holds for it")
        cold = await self._ask(reference, texts.other_prompt())
        redis.pause()
        try:
            answer = await self._ask(replica, texts.other_prompt())
        finally:
            redis.resume()
        # All of the prompt would have been reused, had Redis answered.
        trial = Trial(texts.other_question, replica.name, cold.prompt_tokens, answer, cold)
        self.report.redis_stopped = trial
        self.report.broken += broken_with_redis_stopped(trial)
        self._say_outcome(trial)

    async def _trial(self, tier: str, replica: Replica, reference: Replica, *, question: int) -> None:
        """Ask one question of the reference and of a replica that should find the text in ``tier``."""
        texts = self.prepared.settings.texts
        prompt = texts.prompt(question)
        self.say(f"{replica.name} answers question {question + 1}: expecting the text in {tier}")
        cold = await self._ask(reference, prompt)
        answer = await self._ask(replica, prompt)
        shared = self.prepared.tokens.count_shared(texts.prompt(0), prompt)
        trial = Trial(texts.questions[question], replica.name, shared, answer, cold)
        self.report.trials[tier] = trial
        self.report.broken += broken_of_tier(tier, trial)
        self._say_outcome(trial)

    def _say_outcome(self, trial: Trial) -> None:
        answer = trial.answer
        sources = ", ".join(f"{count} from {tier}" for tier, count in answer.tiers.items() if count) or "none"
        self.say(
            f"   tokens reused: {sources}; {answer.ttft_s:.2f} s to the first token,"
            f" {trial.cold.ttft_s:.2f} s without a store: {answer.text.strip()}"
        )

    async def _ask(self, replica: Replica, prompt: str) -> Answer:
        return await replica.ask(self.http, prompt, max_tokens=_ANSWER_TOKENS)

    async def _replica(self, name: str, store: StoreNode | None) -> Replica:
        address = store.address if store else None
        return await start_replica(self.processes, name, model=self.prepared.settings.model, store=address)

    async def _end(self, replica: Replica) -> None:
        await self.processes.stop(replica.child)

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder
