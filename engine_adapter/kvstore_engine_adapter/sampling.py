"""SamplingParams and Sampler: from logits to the next token, and the log-probabilities of tokens."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidRequest

MAX_SEED = 2**63 - 1

_RANGES = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep all.

    ``min_p`` drops tokens less likely than that share of the likeliest one's probability; 0 keeps all.
    ``presence_penalty`` is taken off the logit of every token of the answer so far, ``frequency_penalty``
    once for each time it occurs there; ``repetition_penalty`` divides positive logits, and multiplies
    negative ones, of every token of prompt and answer (1: none). They come before temperature, as in vLLM.
    ``seed`` makes a request repeatable; None draws one from the system.

    Raises:
        InvalidRequest: a value is outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequest(f"{name}: {value} is outside {low:g}..{high:g}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p: {self.top_p} is outside 0..1 (0 excluded)")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k: {self.top_k} is negative")
        if self.seed is not None and not -MAX_SEED <= self.seed <= MAX_SEED:
            raise InvalidRequest(f"seed: {self.seed} is outside -2**63+1..2**63-1")

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class Sampler:
    """Chooses the tokens of one request, with its own generator: requests never disturb each other.

    It remembers what it chose, for the penalties; ``prompt`` is the request's.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._chosen: Counter[int] = Counter()
        self._seen = set(prompt) if params.repetition_penalty != 1.0 else set[int]()

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the largest logit, whatever came before."""
        return self._params.temperature == 0.0 and not self._params.has_penalties

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token for logits ``[vocab]``, float32.

        Raises:
            ArithmeticError: the logits hold NaN or infinity; the weights or the kernels are broken.
        """
        if not math.isfinite(float(logits.sum())):
            raise _not_finite()
        if self._params.has_penalties:
            logits = self._penalised(logits)
        token = int(logits.argmax()) if self._params.temperature == 0.0 else self._drawn(logits)
        if self._params.has_penalties:
            self._chosen[token] += 1
            self._seen.add(token)
        return token

    def _drawn(self, logits: torch.Tensor) -> int:
        params = self._params
        scaled = logits.cpu().double() / params.temperature
        if not (params.min_p or params.top_k or params.top_p < 1.0):
            return int(torch.multinomial(scaled.softmax(0), 1, generator=self._generator))
        kept, tokens = self._likeliest(scaled)
        if params.top_k:
            kept, tokens = kept[: params.top_k], tokens[: params.top_k]
        probabilities = kept.softmax(0)
        if params.top_p < 1.0:
            # A token stays while the mass before it is below top_p: the first always stays.
            count = int((probabilities.cumsum(0) - probabilities < params.top_p).sum())
            probabilities, tokens = probabilities[:count], tokens[:count]
        drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(tokens[drawn])

    def _likeliest(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits in falling order and their tokens: all that min-p keeps, or as many as top-k needs.

        Sorting a whole vocabulary takes milliseconds, and most cuts leave a few tokens.
        """
        params = self._params
        floor = scaled.max() + math.log(params.min_p) if params.min_p else scaled.min()
        if 0 < params.top_k < len(scaled):
            floor = torch.maximum(floor, scaled.topk(params.top_k).values[-1])
        tokens = (scaled >= floor).nonzero().squeeze(1)
        kept, order = scaled[tokens].sort(descending=True, stable=True)
        return kept, tokens[order]

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        params, changed = self._params, logits.cpu().double()
        if params.repetition_penalty != 1.0 and self._seen:
            seen = torch.tensor(sorted(self._seen))
            values = changed[seen]
            changed[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if self._chosen:
            tokens = torch.tensor(list(self._chosen))
            times = torch.tensor(list(self._chosen.values()), dtype=torch.float64)
            changed[tokens] -= params.presence_penalty + params.frequency_penalty * times
        return changed


def choose_all(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int | ArithmeticError]:
    """Return the next token of each request for logits ``[requests, vocab]``, float32.

    One whose logits are not finite has an ArithmeticError instead.
    """
    finite = logits.sum(dim=1).isfinite().tolist()
    largest = logits.argmax(dim=1).tolist()
    chosen: list[int | ArithmeticError] = []
    for index, sampler in enumerate(samplers):
        if not finite[index]:
            chosen.append(_not_finite())
        elif sampler.is_greedy:
            chosen.append(int(largest[index]))
        else:
            chosen.append(sampler.choose(logits[index]))
    return chosen


def _not_finite() -> ArithmeticError:
    return ArithmeticError("the model produced logits that are not finite")


def log_probabilities(
    logits: torch.Tensor, token: int, top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the natural logarithm of a token's probability, and the ``top`` likeliest tokens with theirs.

    ``logits`` ``[vocab]`` float32 are taken as the model gave them: before temperature, penalties and cuts.
    """
    logs = logits.cpu().double().log_softmax(0)
    values, tokens = logs.topk(min(top, len(logs)))
    likeliest = zip(tokens.tolist(), values.tolist(), strict=True)
    return float(logs[token]), tuple((int(other), float(value)) for other, value in likeliest)
