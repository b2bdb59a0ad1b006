"""Gate: who may call."""

import logging

import pytest

from kvstore.auth import LOCAL, KeyRecord, Keyring, Scope, key_digest
from kvstore.errors import Forbidden, TooManyFailures, Unauthorized
from kvstore.gate import FAILURE_BURST, FailureLimit, Gate, Shown
from kvstore.testing import FakeClock

KEYS = Keyring(
    bytes(32),
    [KeyRecord(scope.value, "acme", frozenset({scope}), key_digest(f"kvs_{scope.value}")) for scope in Scope],
)
HOST = ("127.0.0.1:8470",)


def gate(keyring=KEYS):
    return Gate(None if keyring is None else lambda: keyring, failures=FailureLimit(clock=FakeClock()))


def bearing(key, peer="10.0.0.1"):
    return Shown(authorization=(f"Bearer {key}",), host=HOST, peer=peer)


@pytest.mark.parametrize("scope", Scope)
def test_a_key_with_the_scope_is_let_in(scope):
    assert gate().admit(bearing(f"kvs_{scope.value}"), scope).name == scope.value


@pytest.mark.parametrize("needs", Scope)
@pytest.mark.parametrize("has", Scope)
def test_a_scope_implies_no_other(has, needs):
    if has is needs:
        return
    with pytest.raises(Forbidden, match=f"key {has.value}: lacks the scope {needs.value}"):
        gate().admit(bearing(f"kvs_{has.value}"), needs)


def test_a_route_that_asks_for_no_scope_still_needs_a_key():
    assert gate().admit(bearing("kvs_read"), None).name == "read"
    with pytest.raises(Unauthorized):
        gate().admit(Shown(host=HOST), None)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_read_in_any_case(scheme):
    shown = Shown(authorization=(f"{scheme} kvs_read",), host=HOST)

    assert gate().admit(shown, Scope.READ).name == "read"


@pytest.mark.parametrize(
    "authorization",
    [
        (),
        ("",),
        ("Bearer",),
        ("Bearer ",),
        ("kvs_read",),
        ("Basic kvs_read",),
        ("Bearer kvs_rea",),
        ("Bearer kvs_read, kvs_write",),
        ("Bearer\tkvs_read",),
        ("Bearer kvs_read", "Bearer kvs_read"),
        ("Bearer kvs_bad", "Bearer kvs_read"),
    ],
)
def test_anything_but_one_known_key_is_refused(authorization):
    with pytest.raises(Unauthorized, match="needs a known API key"):
        gate().admit(Shown(authorization=authorization, host=HOST), Scope.READ)


def test_no_key_and_a_bad_key_get_the_same_answer():
    with pytest.raises(Unauthorized) as without:
        gate().admit(Shown(host=HOST), Scope.READ)
    with pytest.raises(Unauthorized) as bad:
        gate().admit(bearing("kvs_bad"), Scope.READ)

    assert str(without.value) == str(bad.value)


def test_a_refusal_and_its_log_line_do_not_show_the_key(caplog):
    shown = bearing("planted-key")
    with caplog.at_level(logging.DEBUG), pytest.raises(Unauthorized) as caught:
        gate().admit(shown, Scope.READ)

    assert "a request from 10.0.0.1 has no known API key" in caplog.text
    assert "planted" not in f"{caplog.text} {caught.value} {shown!r} {shown}"


def test_without_keys_every_caller_is_the_operator():
    assert gate(None).admit(Shown(host=HOST), Scope.ADMIN) is LOCAL
    assert gate(None).admit(bearing("anything"), Scope.WRITE) is LOCAL


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8470", "127.0.0.1", "[::1]:8470", "10.1.2.3:80"])
def test_without_keys_a_host_that_is_an_address_or_localhost_is_let_in(host):
    assert gate(None).admit(Shown(host=(host,)), Scope.READ) is LOCAL


@pytest.mark.parametrize(
    "shown",
    [
        Shown(host=HOST, origin=("http://127.0.0.1:8471",)),
        Shown(host=HOST, origin=("http://127.0.0.1",)),
        Shown(host=HOST, origin=("http://localhost:8470",)),
        Shown(host=HOST, origin=("http://attacker.example",)),
        Shown(host=HOST, origin=("null",)),
        Shown(host=HOST, origin=("",)),
        Shown(host=HOST, origin=("http://127.0.0.1:8470", "http://127.0.0.1:8470")),
        Shown(host=(), origin=("http://127.0.0.1:8470",)),
        Shown(host=(), origin=("http://",)),
        Shown(host=("attacker.example",), origin=("http://attacker.example",)),
        Shown(host=("attacker.example:8470",)),
        Shown(host=("localhost.attacker.example",)),
        Shown(host=("127.0.0.1.attacker.example",)),
        Shown(host=("",)),
        Shown(host=("127.0.0.1", "localhost")),
    ],
)
def test_without_keys_what_a_web_page_could_send_is_refused(shown):
    with pytest.raises(Forbidden, match="a web page may have sent it"):
        gate(None).admit(shown, Scope.READ)


@pytest.mark.parametrize("host", ["127.0.0.1:8470", "localhost:8470", "[::1]:8470"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_without_keys_the_servers_own_page_is_let_in(host, scheme):
    assert gate(None).admit(Shown(host=(host,), origin=(f"{scheme}://{host}",)), Scope.READ) is LOCAL


def test_with_keys_a_name_of_the_server_is_let_in():
    shown = Shown(authorization=("Bearer kvs_read",), host=("store.example",), origin=("https://a.example",))

    assert gate().admit(shown, Scope.READ).name == "read"


def test_a_key_of_a_keyring_that_was_replaced_is_nobodys():
    keyrings = [KEYS]
    guarded = Gate(lambda: keyrings[-1])
    assert guarded.admit(bearing("kvs_read"), Scope.READ)

    keyrings.append(Keyring(bytes(32), []))

    with pytest.raises(Unauthorized):
        guarded.admit(bearing("kvs_read"), Scope.READ)


def test_failures_from_one_address_are_limited_and_a_valid_key_from_it_is_not():
    guarded = gate()
    for _ in range(FAILURE_BURST):
        with pytest.raises(Unauthorized):
            guarded.admit(bearing("kvs_bad"), Scope.READ)

    with pytest.raises(TooManyFailures, match="wait 1 s") as caught:
        guarded.admit(bearing("kvs_bad"), Scope.READ)

    assert caught.value.wait_s == 1
    assert guarded.admit(bearing("kvs_read"), Scope.READ).name == "read"
    assert guarded.counters.as_dict() == {
        "admitted": 1,
        "unauthorized": FAILURE_BURST,
        "forbidden": 0,
        "too_many_failures": 1,
    }


def test_failures_are_allowed_again_after_a_time():
    clock = FakeClock()
    limit = FailureLimit(burst=2, per_s=0.5, clock=clock)
    assert [limit.wait_s("10.0.0.1") for _ in range(3)] == [0, 0, 2]

    clock.advance(2)

    assert [limit.wait_s("10.0.0.1") for _ in range(2)] == [0, 2]


def test_each_address_has_its_own_limit():
    limit = FailureLimit(burst=1, clock=FakeClock())

    assert [limit.wait_s(peer) for peer in ("10.0.0.1", "10.0.0.2", "::1", "")] == [0, 0, 0, 0]


def test_addresses_of_one_ipv6_network_share_a_limit():
    limit = FailureLimit(burst=1, clock=FakeClock())

    assert limit.wait_s("2001:db8::1%eth0") == 0
    assert limit.wait_s("2001:db8::ffff:1") > 0
    assert limit.wait_s("2001:db8:0:1::1") == 0


def test_mapped_ipv4_addresses_do_not_share_one():
    limit = FailureLimit(burst=1, clock=FakeClock())

    assert [limit.wait_s(f"::ffff:10.0.0.{last}") for last in (1, 2)] == [0, 0]


def test_the_memory_of_failures_is_bounded():
    limit = FailureLimit(max_peers=10, clock=FakeClock())

    for number in range(1000):
        limit.wait_s(f"10.0.{number // 256}.{number % 256}")

    assert limit.num_peers == 10
