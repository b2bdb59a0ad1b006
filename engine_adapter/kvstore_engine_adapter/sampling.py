"""SamplingParams and Sampler: from logits to the next token."""

import math
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidRequest

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep all.

    ``seed`` makes a request repeatable; None draws one from the system.

    Raises:
        InvalidRequest: a value is outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise InvalidRequest(f"temperature: {self.temperature} is outside 0..2")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p: {self.top_p} is outside 0..1 (0 excluded)")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k: {self.top_k} is negative")
        if self.seed is not None and not -MAX_SEED <= self.seed <= MAX_SEED:
            raise InvalidRequest(f"seed: {self.seed} is outside -2**63+1..2**63-1")


class Sampler:
    """Chooses the tokens of one request, with its own generator: requests never disturb each other."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token for logits ``[vocab]``, float32.

        Raises:
            ArithmeticError: the logits hold NaN or infinity; the weights or the kernels are broken.
        """
        if not math.isfinite(float(logits.sum())):
            raise ArithmeticError("the model produced logits that are not finite")
        if self._params.temperature == 0.0:
            return int(logits.argmax())
        scaled = logits.cpu().double() / self._params.temperature
        kept, tokens = scaled.sort(descending=True, stable=True)
        if self._params.top_k:
            kept, tokens = kept[: self._params.top_k], tokens[: self._params.top_k]
        probabilities = kept.softmax(0)
        if self._params.top_p < 1.0:
            # A token stays while the mass before it is below top_p: the first always stays.
            count = int((probabilities.cumsum(0) - probabilities < self._params.top_p).sum())
            probabilities, tokens = probabilities[:count], tokens[:count]
        drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(tokens[drawn])
