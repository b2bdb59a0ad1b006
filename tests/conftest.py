"""What all tests share: how hypothesis tries examples.

The same examples everywhere and each time, so that a change is judged by what it changed, and no verdicts by
the clock, which a busy machine would fail by chance. ``--hypothesis-profile=explore`` tries other examples at
each run, ten times as many, and remembers what failed in ``.hypothesis``.
"""

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.example_counts import EXPLORE, EXPLORED_TIMES

settings.register_profile(
    "kvstore",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    EXPLORE,
    settings.get_profile("kvstore"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    max_examples=100 * EXPLORED_TIMES,
)
settings.load_profile("kvstore")
