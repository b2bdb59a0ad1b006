"""How many examples hypothesis tries where a test says so."""

from hypothesis import settings

EXPLORE = "explore"
EXPLORED_TIMES = 10


def examples(count: int) -> int:
    """Return ``count``, or ten times as many with ``--hypothesis-profile=explore``."""
    return count * EXPLORED_TIMES if settings.get_current_profile_name() == EXPLORE else count
