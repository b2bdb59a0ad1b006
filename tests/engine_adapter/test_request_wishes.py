"""What a request may say to the store, and what becomes of values that are wrong."""

import pytest

from kvstore.hints import Hints
from kvstore_engine_adapter.request_wishes import RequestWishes


def read(**told: object) -> RequestWishes:
    return RequestWishes.read({"kvstore": told})


@pytest.mark.parametrize("params", [None, {}, {"kvstore": None}, {"other": 1}, "text", 3])
def test_a_request_that_says_nothing_uses_and_stores_blocks(params: object) -> None:
    assert RequestWishes.read(params) == RequestWishes()


def test_everything_that_can_be_said_is_understood() -> None:
    wishes = read(
        lookup=False, save=False, tenant="acme", session="c1", priority=-2, next_use_s=60, is_one_off=True,
        ends_session=True, output_tokens=7,
    )  # fmt: skip
    hints = Hints(ends_session=True, is_one_off=True, next_use_s=60, priority=-2, output_tokens=7)
    assert wishes == RequestWishes(
        wants_lookup=False, wants_save=False, tenant="acme", session="c1", hints=hints
    )
    assert wishes.ends_session


@pytest.mark.parametrize(
    "told",
    [
        {"lookup": 0},
        {"save": "no"},
        {"session": 5},
        {"session": "x" * 300},
        {"priority": 99},
        {"priority": True},
        {"next_use_s": -1},
        {"next_use_s": float("nan")},
        {"is_one_off": "yes"},
        {"ends_session": None},
        {"output_tokens": 1.5},
        {"unknown": 1},
        {7: 1},
    ],
)
def test_a_wrong_value_is_left_out_alone_and_counted(told: dict[object, object]) -> None:
    wishes = RequestWishes.read({"kvstore": {**told, "tenant": "acme"}})
    assert wishes == RequestWishes(tenant="acme", num_bad=1)


def test_of_several_hints_the_right_ones_count() -> None:
    assert read(priority=99, next_use_s=5) == RequestWishes(hints=Hints(next_use_s=5), num_bad=1)


@pytest.mark.parametrize("tenant", [3, None, "x" * 257, "a\0b", "\ud800", ["acme"]])
def test_a_request_whose_tenant_is_not_known_shares_nothing(tenant: object) -> None:
    assert read(tenant=tenant) == RequestWishes(wants_lookup=False, wants_save=False, num_bad=1)


def test_a_section_that_is_no_object_is_one_wrong_value() -> None:
    assert RequestWishes.read({"kvstore": [1]}) == RequestWishes(num_bad=1)
