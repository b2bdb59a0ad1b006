"""GenerateRequest and what comes back: tokens, and a report of where the prompt's KV came from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore_engine_adapter.request_blocks import LoadedPrefix
from kvstore_engine_adapter.sampling import SamplingParams


class EngineBusy(KVStoreError):
    """The engine's queue is full; try again later."""


class EngineClosed(KVStoreError):
    """The engine is not open, or is closing."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt to continue.

    ``max_tokens`` None: up to the context's end. ``end_tokens`` end the answer and are not part of it.
    ``wants_first_logits`` asks for the logits the first token was chosen from.
    """

    prompt: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_tokens: frozenset[int] = frozenset()
    wants_first_logits: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    token: int


@dataclass(slots=True)
class RequestReport:
    """Where a prompt's KV came from and how long it took.

    ``matched_tokens`` were not computed; ``tokens_by_tier`` says where they came from. ``found_tokens`` were
    stored (more than matched if loading was skipped or late). ``miss_reason`` says why the first block that
    was computed was not reused; None if every full block before the last token was. Seconds: ``queue_s``
    before its turn, ``load_s`` for match and load, ``prefill_s`` to the first token's logits, ``ttft_s`` from
    arrival to the first token. ``first_logits`` is ``[vocab]`` float32 if it was asked for.
    """

    prompt_tokens: int
    output_tokens: int = 0
    matched_tokens: int = 0
    found_tokens: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    first_logits: npt.NDArray[np.float32] | None = None

    def note_prefix(self, prefix: LoadedPrefix, block_tokens: int) -> None:
        """Take over what loading found."""
        self.matched_tokens = len(prefix.slots) * block_tokens
        self.found_tokens = prefix.found_blocks * block_tokens
        self.tokens_by_tier = {tier: n * block_tokens for tier, n in Counter(prefix.tiers).items()}
        self.miss_reason = prefix.reason
        self.load_s = prefix.seconds


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed. The report's count of output tokens goes on growing."""

    report: RequestReport


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: ``stop`` (an end token) or ``length``."""

    reason: str
    report: RequestReport
