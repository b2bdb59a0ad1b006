"""Every number of an answer may be anything: one that makes no sense is a miss, or ProtocolMismatch."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, PrefixChain
from kvstore.errors import ProtocolMismatch
from kvstore.results import BlockReport, EraseReport
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.client.scripted_http import answering, reply
from tests.http.http_store import layout_fields

KEY = NAMESPACE.chain(range(4)).keys[0].hex()
NUMBERS = {
    "400 digits": "1" + "0" * 400,
    "400 digits below zero": "-1" + "0" * 400,
    "5000 digits": "1" + "0" * 5000,
    "infinite": "Infinity",
    "not a number": "NaN",
    "beyond what a float holds": "1e999",
    "negative": "-1",
    "a truth": "true",
    "a text": '"1"',
    "nothing": "null",
    "a list": "[1]",
}
LEASED = '{"blocks": 1, "tiers": ["dram"], "reason": null, "lease": "%s", "leased": 1, "lease_s": 30}' % (
    "0" * 32
)
DATA_ANSWERS: dict[str, tuple[str, str, Callable[[KVStore, PrefixChain], Any]]] = {
    "match": (
        '{"blocks": 1, "tiers": ["dram"], "reason": null}',
        '"blocks": 1',
        lambda c, chain: c.match(chain),
    ),
    "leased": (LEASED, '"leased": 1', lambda c, chain: c.match(chain, lease=True)),
    "lease_s": (LEASED, '"lease_s": 30', lambda c, chain: c.lease(chain)),
    "prefetch": ('{"blocks": 1}', '"blocks": 1', lambda c, chain: c.prefetch(chain)),
    "stored": (
        '{"stored": 1, "present": 0, "dropped": 0, "doubtful": []}',
        '"stored": 1',
        lambda c, chain: c.put(chain, bytes(BLOCK_BYTES)),
    ),
    "doubtful": (
        '{"stored": 0, "present": 0, "dropped": 1, "doubtful": [0]}',
        "[0]",
        lambda c, chain: c.put(chain, bytes(BLOCK_BYTES)),
    ),
}
CONTROL_ANSWERS: dict[str, tuple[str, str, Callable[[KVStore, PrefixChain], Any]]] = {
    "dropped": ('{"dropped": 1}', '"dropped": 1', lambda c, chain: c.drop(chain)),
    "epoch": ('{"epoch": 1}', '"epoch": 1', lambda c, chain: c.advance_epoch("m")),
    "gone_s": (
        f'{{"blocks": [{{"index": 0, "key": "{KEY}", "tiers": [], "reason": "evicted", "gone_s": 1}}]}}',
        '"gone_s": 1',
        lambda c, chain: c.why(chain),
    ),
    "erased": (
        '{"keys": 1, "blocks": {"dram": 1}, "leased_blocks": 1, "problems": []}',
        '"keys": 1',
        lambda c, chain: c.erase_tenant(b"salt"),
    ),
    "listed": (
        json.dumps({"namespaces": [{"model": "m", "epoch": 1, "layout": layout_fields()}]}),
        '"epoch": 1',
        lambda c, chain: c.namespaces(),
    ),
}


def spoilt(text: str, member: str, number: str) -> bytes:
    assert member in text
    name, colon, _ = member.rpartition(": ")
    return text.replace(member, f"{name}{colon}{number}" if colon else f"[{number}]").encode()


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(("text", "member", "call"), DATA_ANSWERS.values(), ids=DATA_ANSWERS)
def test_on_the_data_path_it_is_a_counted_miss(
    chain: PrefixChain, number: str, text: str, member: str, call: Callable[[KVStore, PrefixChain], Any]
) -> None:
    with (
        answering(reply(spoilt(text, member, number))) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
    ):
        client._state.open_namespace(NAMESPACE)
        call(client, chain[:1])
        assert client.client_stats().protocol_errors == 1


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(("text", "member", "call"), CONTROL_ANSWERS.values(), ids=CONTROL_ANSWERS)
def test_of_a_control_call_it_is_a_protocol_mismatch(
    chain: PrefixChain, number: str, text: str, member: str, call: Callable[[KVStore, PrefixChain], Any]
) -> None:
    is_allowed = (member, number) == ('"gone_s": 1', "null") or ("layout" in text and number == "true")
    with (
        answering(reply(spoilt(text, member, number))) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
    ):
        client._state.open_namespace(NAMESPACE)
        with contextlib.nullcontext() if is_allowed else pytest.raises(ProtocolMismatch):
            call(client, chain[:1])


def test_a_renewal_for_400_digits_of_seconds_is_none(chain: PrefixChain) -> None:
    answers = [reply(LEASED.encode()), reply(b'{"lease_s": 1' + b"0" * 400 + b"}")]
    with (
        answering(lambda stream: answers.pop(0)(stream)) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
    ):
        client._state.open_namespace(NAMESPACE)
        lease = client.match(chain, lease=True).lease
        assert lease.blocks == 1
        assert not lease.renew()


@pytest.mark.parametrize(
    "value", [10**400, -1, 1.5, float("nan"), float("inf"), True, "1", None, np.int64(3)]
)
def test_reports_are_read_with_numbers_only(value: object) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        BlockReport.from_dict({"index": value, "key": KEY, "tiers": [], "reason": None})
    with pytest.raises((ValueError, TypeError, OverflowError)):
        EraseReport.from_dict({"keys": 0, "blocks": {"ssd": value}, "leased_blocks": 0, "problems": []})
