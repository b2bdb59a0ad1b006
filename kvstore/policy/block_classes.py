"""The classes of blocks, from what a chain and its uses tell."""

from bisect import bisect_left

from kvstore.policy.hazards import ClassPath
from kvstore.policy.protocol import Hint

_USED, _NEW, _TRAILING = range(3)
_USES = (2, 3, 4, 6, 10, 20)
_GAPS_S = (1, 5, 20, 60, 180, 600, 1800, 7200)
_NEW_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
_OUTPUTS = (10, 50, 200)


def _output(hint: Hint) -> int:
    return 0 if hint.output_tokens is None else 1 + bisect_left(_OUTPUTS, hint.output_tokens)


def used_class(uses: int, gap_s: float, hint: Hint) -> ClassPath:
    return (_USED, bisect_left(_USES, uses), bisect_left(_GAPS_S, gap_s), _output(hint))


def new_class(turn: int, num_new: int, hint: Hint) -> ClassPath:
    return (_NEW, min(turn, 3), bisect_left(_NEW_BLOCKS, num_new), _output(hint))


def trailing_class(turn: int, hint: Hint) -> ClassPath:
    return (_TRAILING, min(turn, 3), 0, _output(hint))
