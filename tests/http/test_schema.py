"""Requests are checked against their schemas: thousands of items in no time, and wrong ones all the same."""

import json
import time

import pytest

from kvstore.http.refusal import Refused
from kvstore.http.schema import check, parse_json
from kvstore.http.schemas import LOOKUP, STORE_HEAD

NAMESPACE = "a" * 64
MANY = 400_000


def seconds_of(call):
    """The least of three tries, so that another process costs nothing."""
    tries = []
    for _ in range(3):
        started_s = time.perf_counter()
        call()
        tries.append(time.perf_counter() - started_s)
    return min(tries)


@pytest.mark.alone
def test_a_body_full_of_tokens_is_checked_about_as_fast_as_it_is_parsed():
    data = json.dumps({"namespace": NAMESPACE, "tokens": [1] * MANY}).encode()
    value = parse_json(data)
    assert seconds_of(lambda: check(LOOKUP, value, "body")) < 6 * seconds_of(lambda: parse_json(data))


@pytest.mark.parametrize("wrong", [-1, 1 << 32, True, None, "1", 1.5, [1]], ids=repr)
@pytest.mark.parametrize("place", [0, 999])
def test_one_wrong_token_among_many_is_named(wrong, place):
    tokens = [7] * 1000
    tokens[place] = wrong
    with pytest.raises(Refused, match=rf"body\.tokens\[{place}\]"):
        check(LOOKUP, {"namespace": NAMESPACE, "tokens": tokens}, "body")


@pytest.mark.parametrize("wrong", ["", "0" * 15, "0" * 17, "G" * 16, "A" * 16, "0" * 15 + "\n", 1], ids=repr)
def test_one_wrong_checksum_among_many_is_named(wrong):
    head = {"namespace": NAMESPACE, "keys": [], "checksums": ["0" * 16] * 10 + [wrong]}
    with pytest.raises(Refused, match=r"head\.checksums\[10\]"):
        check(STORE_HEAD, head, "head")


@pytest.mark.parametrize("tokens", [[], [0], [(1 << 32) - 1, 0]])
def test_right_tokens_pass(tokens):
    check(LOOKUP, {"namespace": NAMESPACE, "tokens": tokens}, "body")
