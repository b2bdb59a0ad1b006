"""MissReason: why a block was not served."""

import enum


class MissReason(enum.Enum):
    """Why a block was not served. A closed set: metric labels and ``why`` use these words.

    ``BEHIND_MISS`` counts the blocks of a chain after the first that is missing: a prefix cache cannot use
    them, stored or not.
    """

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    DROPPED = "dropped"
    CORRUPT = "corrupt"
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"
    BREAKER_OPEN = "breaker_open"
    NO_ROOM = "no_room"
    QUOTA = "quota"
    NOT_ADMITTED = "not_admitted"
    OTHER_EPOCH = "other_epoch"
    OTHER_NAMESPACE = "other_namespace"
    ERASED = "erased"
    BEHIND_MISS = "behind_miss"
