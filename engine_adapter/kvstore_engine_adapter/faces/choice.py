"""Choice: one answer as it grows: its tokens, its text up to a stop, why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_engine_adapter.generation import Finished, RequestReport, Token
from kvstore_engine_adapter.tokenizer import TextStream


class StopCut:
    """Cuts a growing text at the first stop text: before it, or with ``keeps_stop`` where the text was then.

    Text that may be the beginning of a stop is held until that is decided, if the cut would be before it.
    ``released_chars`` were let out; ``end_chars`` is where the text was cut, None while it was not.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._seen = ""
        self.released_chars = 0
        self.end_chars: int | None = None

    def push(self, text: str) -> str:
        """Return the text that may be sent now."""
        return self._release(text, is_last=False)

    def finish(self, text: str = "") -> str:
        """Return what is left, after a last piece of text."""
        return self._release(text, is_last=True)

    def _release(self, text: str, *, is_last: bool) -> str:
        if self.end_chars is not None:
            return ""
        # What is seen begins with what may belong to a stop, and was let out already if stops are kept.
        self._seen += text
        found = [at for at in (self._seen.find(stop) for stop in self._stops) if at >= 0]
        open_chars = max((_overlap(self._seen, stop) for stop in self._stops), default=0)
        if self._keeps_stop:
            released = text
            self._seen = self._seen[len(self._seen) - open_chars :]
        elif found:
            released = self._seen[: min(found)]
        else:
            size = len(self._seen) - (0 if is_last else open_chars)
            released, self._seen = self._seen[:size], self._seen[size:]
        self.released_chars += len(released)
        if found:
            self.end_chars = self.released_chars
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of an answer. ``text`` is what it completes, ``start_chars`` where that begins."""

    token: int
    text: str
    start_chars: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What has come of one choice: text that may be sent, and the tokens it is made of.

    ``finish_reason`` is given in a choice's last piece: ``stop`` or ``length``.
    """

    index: int
    text: str = ""
    tokens: tuple[AnswerToken, ...] = ()
    finish_reason: str | None = None

    def joined(self, later: "Piece") -> "Piece":
        """Return this piece and a later one of the same choice as one."""
        return Piece(self.index, self.text + later.text, self.tokens + later.tokens, later.finish_reason)


@dataclass(slots=True)
class Choice:
    """One answer as it grows.

    ``finish_reason`` is given at its end: ``stop`` or ``length``; ``end`` is the token that ended it, if one
    did. A token is part of the answer if its text begins before the cut; ``tokens`` has them all if
    ``keeps_tokens``.
    """

    index: int
    report: RequestReport
    stream: TextStream
    cut: StopCut
    keeps_tokens: bool = False
    tokens: list[AnswerToken] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    end: Token | None = None
    _decoded_chars: int = 0
    _held: list[AnswerToken] = field(default_factory=list)

    @property
    def has_stop_text(self) -> bool:
        """Whether a stop text ended it."""
        return self.cut.end_chars is not None

    def push(self, token: Token) -> Piece:
        """Add a token; the piece has a finish reason if a stop text ends the answer there."""
        text = self.stream.push(token.token)
        self._held.append(
            AnswerToken(token.token, text, self._decoded_chars, token.logprob, token.top_logprobs)
        )
        self._decoded_chars += len(text)
        released = self.cut.push(text)
        return self._piece(released, "stop" if self.has_stop_text else None)

    def finish(self, event: Finished) -> Piece:
        """End it as the engine says; returns the last piece."""
        self.end = event.end
        released = self.cut.finish(self.stream.finish())
        return self._piece(released, "stop" if self.has_stop_text else event.reason)

    def _piece(self, released: str, reason: str | None) -> Piece:
        is_whole = reason is not None and not self.has_stop_text
        tokens = tuple(
            token for token in self._held if is_whole or token.start_chars < self.cut.released_chars
        )
        self._held = self._held[len(tokens) :]
        if self.keeps_tokens:
            self.tokens += tokens
        self.text += released
        self.finish_reason = reason
        return Piece(self.index, released, tokens, reason)
