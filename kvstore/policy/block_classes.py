"""The classes of blocks: what its chain, uses and hints say about when a block comes again."""

import math
from bisect import bisect_left

from kvstore.policy.hazards import EDGES_S, ClassPath
from kvstore.policy.protocol import Hint

_USED, _NEW, _TRAILING, _ENDED, _ONE_OFF, _EXPECTED = range(6)

_USES = (1, 2, 3, 4, 6, 10, 20)
_GAPS_S = (1, 5, 20, 60, 180, 600, 1800, 7200)
_NEW_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
_OUTPUT_TOKENS = (10, 50, 200)
_MAX_TURN = 3
_MAX_EXPECTED = 20
_UNLIKELY = 0.1
_LIKELY = 4.0


def used_class(uses: int, gap_s: float, hint: Hint) -> ClassPath:
    """The class of a block that was used before: by the number of its uses, then by the last gap."""
    declared = _declared(uses, hint)
    return declared or (_USED, bisect_left(_USES, uses), bisect_left(_GAPS_S, gap_s), _output(hint))


def new_class(turn: int, num_new: int, hint: Hint) -> ClassPath:
    """The class of a new block inside a request's chain: by the turn, then by how many blocks are new."""
    if hint.is_one_off:
        return (_ONE_OFF, 0, 0, 0)
    declared = _declared(1, hint)
    return declared or (_NEW, min(turn, _MAX_TURN), bisect_left(_NEW_BLOCKS, num_new), _output(hint))


def trailing_class(turn: int, num_new: int, hint: Hint) -> ClassPath:
    """The class of a request's last block, if it is new: one that is partial never comes again.

    Where no partial block is stored it fares as those before it, so it is told apart by the same features.
    """
    if hint.is_one_off:
        return (_ONE_OFF, 1, 0, 0)
    return _declared(1, hint) or (
        _TRAILING,
        min(turn, _MAX_TURN),
        bisect_left(_NEW_BLOCKS, num_new),
        _output(hint),
    )


def told_class(path: ClassPath, uses: int, hint: Hint) -> ClassPath:
    """The class of a block of class ``path`` after more was said of it, without a use."""
    kind, first, second, _ = path
    if hint.is_one_off and uses == 1:
        return (_ONE_OFF, int(kind == _TRAILING), 0, 0)
    declared = _declared(uses, hint)
    if declared is not None or kind > _TRAILING or hint.output_tokens is None:
        return declared or path
    return (kind, first, second, _output(hint))


def first_factors(path: ClassPath) -> list[float] | None:
    """How much more or less likely a use is at each age than of any block, before anything was seen."""
    kind, bucket, _, _ = path
    if kind in (_ENDED, _ONE_OFF):
        return [_UNLIKELY] * len(EDGES_S)
    if kind == _EXPECTED:
        end_s = 2.0 ** (bucket + 1)
        return [_LIKELY if start_s < end_s else _UNLIKELY for start_s in EDGES_S]
    return None


def _declared(uses: int, hint: Hint) -> ClassPath | None:
    if hint.ends_session:
        return (_ENDED, bisect_left(_USES, uses), 0, 0)
    if hint.next_use_s is not None:
        bucket = math.ceil(math.log2(max(1.0, hint.next_use_s)))
        return (_EXPECTED, min(bucket, _MAX_EXPECTED), 0, 0)
    return None


def _output(hint: Hint) -> int:
    return 0 if hint.output_tokens is None else 1 + bisect_left(_OUTPUT_TOKENS, hint.output_tokens)
