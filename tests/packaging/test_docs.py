"""The documentation names what the code has."""

import asyncio
import importlib.util
import re
from pathlib import Path

import pytest

from kvstore import answers, record_messages, requests, server, wire
from kvstore.answers import FailureCode
from kvstore.miss import MissReason
from kvstore.records import RecordAbsence, RecordOutcome
from kvstore.server_socket import BACKLOG
from kvstore.serving import MAX_IN_FLIGHT
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

    documented = {key.split(".")[0] for key in first_column("stats.md")} - {"server", "http", "records"}

    assert asyncio.run(keys()) == documented


def test_every_outcome_and_reason_of_records_is_documented():
    words = {kind.value for kind in (*RecordOutcome, *RecordAbsence)}

    assert first_column("records.md") >= words


def test_every_page_is_linked_from_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))

    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= linked


def generated_pages():
    path = DOCS.parent / "scripts" / "reference.py"
    if not path.exists():
        return {}
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PAGES


@pytest.mark.parametrize(("name", "page"), generated_pages().items())
def test_a_generated_page_says_what_the_code_says(name, page):
    assert (DOCS / name).read_text() == page(), "run .venv/bin/python scripts/reference.py"


def message_kinds(module):
    found = vars(module).values()
    return {
        (kind.KIND, kind.__name__) for kind in found if isinstance(kind, type) and "KIND" in kind.__dict__
    }


def test_every_message_of_the_protocol_is_documented_with_its_number():
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \|", (DOCS / "wire.md").read_text(), re.MULTILINE)

    modules = (requests, answers, record_messages)
    assert {(int(kind, 0), name) for kind, name in rows} == set().union(*map(message_kinds, modules))


def test_every_failure_code_is_documented():
    assert first_column("wire.md") == {code.value for code in FailureCode}


@pytest.mark.parametrize(
    "text",
    [
        f"A prefix of {wire.PREFIX_BYTES} bytes",
        f"| `{wire.MAGIC.decode()}` |",
        f"protocol version: {wire.VERSION} |",
        f"at most {wire.MAX_BODY_BYTES} |",
        f"at most {wire.MAX_KEYS} keys",
        f"At most {MAX_IN_FLIGHT} requests of a connection",
        f"{BACKLOG} clients may be greeting",
        f"within {server._GREETING_TIMEOUT_S:g} s",
        f"at most {wire._MAX_ARRAY} values",
        f"at most {wire.AHEAD_BYTES >> 20} MiB to a connection",
        f"(UTF-8, at most {wire._MAX_TEXT_BYTES} bytes)",
    ],
)
def test_the_numbers_of_the_protocol_are_those_of_the_code(text):
    assert text in " ".join((DOCS / "wire.md").read_text().split())
