"""The documentation names what the code has."""

import asyncio
import re
from pathlib import Path

import pytest

from kvstore.miss import MissReason
from tests.core.manager_harness import running

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation is not beside the tests")


def first_column(name):
    rows = re.findall(r"^\| (`.+?) \|", (DOCS / name).read_text(), re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_every_miss_reason_is_documented():
    assert first_column("misses.md") == {reason.value for reason in MissReason}


def test_every_top_level_key_of_stats_is_documented():
    async def keys():
        async with running() as store:
            return set(store.manager.stats())

    documented = {key.split(".")[0] for key in first_column("stats.md")} - {"server"}

    assert asyncio.run(keys()) == documented


def test_every_page_is_linked_from_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))

    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= linked
