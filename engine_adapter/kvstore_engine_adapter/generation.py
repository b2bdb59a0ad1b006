"""GenerateRequest and what comes back: tokens, and a report of where the prompt's KV came from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.hints import Hints
from kvstore_engine_adapter.request_blocks import LoadedPrefix
from kvstore_engine_adapter.sampling import SamplingParams

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for, as in OpenAI's API."""

_MAX_PRIORITY = 2**31 - 1


class EngineBusy(KVStoreError):
    """The engine's queue is full; try again later."""


class EngineClosed(KVStoreError):
    """The engine is not open, or is closing."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt to continue.

    ``max_tokens`` None: up to the context's end. ``end_tokens`` end the answer and are not part of it.
    ``wants_first_logits`` asks for the logits the first token was chosen from. A lower ``priority`` is more
    urgent. ``logprobs`` asks for the chosen tokens' log-probabilities and those of so many of the likeliest
    tokens beside them; None: of none. ``tenant_salt`` separates its blocks from those of requests with
    another one; empty: that of the engine's settings. ``hints`` say what is known of its blocks' future; the
    length of its answer is added when it ends.

    Raises:
        InvalidRequest: ``priority`` or ``logprobs`` is outside its range.
    """

    prompt: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_tokens: frozenset[int] = frozenset()
    wants_first_logits: bool = False
    priority: int = 0
    logprobs: int | None = None
    tenant_salt: bytes = b""
    hints: Hints | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs: {self.logprobs} is outside 0..{MAX_LOGPROBS}")
        if not -_MAX_PRIORITY <= self.priority <= _MAX_PRIORITY:
            raise InvalidRequest(f"priority: {self.priority} is outside -2**31+1..2**31-1")


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    ``logprob`` is the natural logarithm of its probability, and ``top_logprobs`` the likeliest tokens with
    theirs, likeliest first, if the request asked for them. They are the model's own, before temperature,
    penalties and cuts; the chosen token need not be among the likeliest.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestReport:
    """Where a prompt's KV came from and how long it took.

    ``matched_tokens`` were not computed; ``tokens_by_tier`` says where they came from. ``found_tokens`` were
    stored (more than matched if loading was skipped or late). ``miss_reason`` says why the first block that
    was computed was not reused; None if every full block before the last token was. Seconds: ``queue_s``
    before it got a seat, ``load_s`` for match and load, ``match_s`` of them for the match, ``prefill_s`` from
    then to the first token's logits, ``ttft_s`` from arrival to the first token. ``preemptions`` counts how
    often it lost its seat to another request. ``first_logits`` is ``[vocab]`` float32 if it was asked for.
    """

    prompt_tokens: int
    output_tokens: int = 0
    matched_tokens: int = 0
    found_tokens: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    queue_s: float = 0.0
    match_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    preemptions: int = 0
    first_logits: npt.NDArray[np.float32] | None = None

    def note_joined(self, tokens: int, tier: str, *, is_all: bool) -> None:
        """Count tokens of ``tier`` that came meanwhile; ``is_all`` if no full block is left."""
        self.matched_tokens += tokens
        self.found_tokens = max(self.found_tokens, self.matched_tokens)
        self.tokens_by_tier[tier] = self.tokens_by_tier.get(tier, 0) + tokens
        if is_all:
            self.miss_reason = None

    def note_prefix(self, prefix: LoadedPrefix, block_tokens: int) -> None:
        """Take over what loading found."""
        self.matched_tokens = len(prefix.slots) * block_tokens
        self.found_tokens = prefix.found_blocks * block_tokens
        self.tokens_by_tier = {tier: n * block_tokens for tier, n in Counter(prefix.tiers).items()}
        self.miss_reason = prefix.reason
        self.match_s, self.load_s = prefix.match_s, prefix.seconds


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed. The report's count of output tokens goes on growing."""

    report: RequestReport


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: ``stop`` (by the token ``end``, which is no part of it) or ``length``."""

    reason: str
    report: RequestReport
    end: Token | None = None
