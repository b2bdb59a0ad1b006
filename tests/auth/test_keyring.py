"""Keyring: whose key it is, in constant time, and nothing of it shown."""

import ast
import hashlib
import hmac
import inspect
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.auth import LOCAL, MAX_KEYS, Identity, KeyRecord, Keyring, Scope, key_digest, read_scopes
from kvstore.errors import InvalidConfig

SECRET = "5e" * 32
TEXT = f"""
# who may do what
secret {SECRET}
key reader acme read {hashlib.sha256(b"kvs_reader").hexdigest()}
key writer acme read,write {hashlib.sha256(b"kvs_writer").hexdigest()}  # the trainer
key ops house admin {hashlib.sha256(b"kvs_ops").hexdigest()}
"""


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_key_is_identified_by_its_text():
    caller = Keyring.parse(TEXT).identify("kvs_writer")

    assert (caller.name, caller.tenant, caller.scopes) == ("writer", "acme", {Scope.READ, Scope.WRITE})


@pytest.mark.parametrize("key", ["", "kvs_", "kvs_reader ", "kvs_Reader", "x" * 9000, "\udc80", "\0"])
def test_an_unknown_key_is_nobodys(key):
    assert Keyring.parse(TEXT).identify(key) is None


def test_a_key_of_no_valid_text_is_nobodys():
    assert Keyring.parse(TEXT).identify("\ud800") is None


def test_the_digest_of_a_key_is_not_the_key():
    assert Keyring.parse(TEXT).identify(digest_of("kvs_reader")) is None


def test_a_tenants_salt_is_the_keyed_hash_of_its_name():
    expected = hmac.new(bytes.fromhex(SECRET), b"kvstore.tenant.v1acme", hashlib.sha256).digest()

    assert Keyring.parse(TEXT).identify("kvs_reader").salt == expected
    assert Keyring.parse(TEXT).salt("acme") == expected


def test_keys_of_a_tenant_share_its_salt_and_other_tenants_do_not():
    keyring = Keyring.parse(TEXT)

    assert keyring.identify("kvs_reader").salt == keyring.identify("kvs_writer").salt
    assert keyring.identify("kvs_reader").salt != keyring.identify("kvs_ops").salt


def test_the_operator_may_everything_and_has_no_salt():
    assert LOCAL.is_operator
    assert LOCAL.salt == b""
    assert all(LOCAL.may(scope) for scope in Scope)


def test_admin_implies_neither_read_nor_write():
    ops = Keyring.parse(TEXT).identify("kvs_ops")

    assert [scope for scope in Scope if ops.may(scope)] == [Scope.ADMIN]


def test_no_text_form_shows_secret_digest_or_salt():
    keyring = Keyring.parse(TEXT)
    shown = "".join(
        f"{thing!r}{thing!s}"
        for thing in (keyring, *keyring.records, keyring.identify("kvs_ops"), keyring.identify("kvs_reader"))
    )
    secrets = [keyring.salt("acme"), keyring.salt("house"), bytes.fromhex(SECRET)]
    secrets += [record.digest for record in keyring.records]

    assert not [secret for secret in secrets if secret.hex() in shown or repr(secret) in shown]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no line 'secret HEX'"),
        ("secret abc", "line 1: the secret is not 64 or more hex digits"),
        (f"secret {'5e' * 31}", "line 1: the secret is not 64 or more hex digits"),
        (f"secret {SECRET}\nsecret {SECRET}", "line 2: a second secret"),
        (f"secret {SECRET}\nkey a acme read", "line 2: expected 'secret HEX' or 'key"),
        (f"secret {SECRET}\nkey a acme read {'0' * 63}", "line 2: the digest is not 64 hex digits"),
        (f"secret {SECRET}\nkey a acme read {'A' * 64}", "line 2: the digest is not 64 hex digits"),
        (
            f"secret {SECRET}\nkey a acme reads {'0' * 64}",
            "line 2: scopes: expected some of read, write, admin",
        ),
        (f"secret {SECRET}\nkey a acme read,read {'0' * 64}", "line 2: scopes"),
        (f"secret {SECRET}\nkey a a/b read {'0' * 64}", "line 2: tenant: expected 1 to 64 letters"),
        (f"secret {SECRET}\nkey local acme read {'0' * 64}", "line 2: name: expected"),
        (
            f"secret {SECRET}\nkey a acme read {'0' * 64}\nkey a b read {'1' * 64}",
            "two keys have the same name",
        ),
        (
            f"secret {SECRET}\nkey a acme read {'0' * 64}\nkey b b read {'0' * 64}",
            "two keys have the same text",
        ),
    ],
)
def test_a_malformed_keyring_is_refused_with_its_line(text, complaint):
    with pytest.raises(InvalidConfig, match=complaint):
        Keyring.parse(text)


def test_a_refusal_quotes_nothing_of_the_keyring():
    secret = "planted" + "0" * 60

    with pytest.raises(InvalidConfig) as caught:
        Keyring.parse(f"secret {secret}")

    assert "planted" not in str(caught.value)


def test_a_keyring_holds_at_most_so_many_keys():
    records = [
        KeyRecord(f"k{number}", "acme", frozenset({Scope.READ}), number.to_bytes(32))
        for number in range(MAX_KEYS + 1)
    ]

    with pytest.raises(InvalidConfig, match=f"{MAX_KEYS + 1} keys, at most {MAX_KEYS}"):
        Keyring(bytes(32), records)
    assert len(Keyring(bytes(32), records[1:])) == MAX_KEYS


def test_a_short_secret_is_refused():
    with pytest.raises(InvalidConfig, match="31 bytes, at least 32"):
        Keyring(bytes(31), [])


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_keyring_or_refused(text):
    try:
        Keyring.parse(text)
    except InvalidConfig:
        return
    assert "secret" in text


@given(st.text(max_size=300))
def test_only_the_exact_text_of_a_key_is_identified(key):
    keyring = Keyring(bytes(32), [KeyRecord("k", "acme", frozenset({Scope.READ}), key_digest("kvs_real"))])

    assert (keyring.identify(key) is not None) == (key == "kvs_real")


def test_a_key_is_compared_in_constant_time_with_every_known_one():
    """The loop has no way out before its end, and compares nothing but digests of one length."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Keyring.identify)))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    ways_out = [
        node
        for loop in loops
        for node in ast.walk(loop)
        if isinstance(node, ast.Break | ast.Return | ast.Raise | ast.Continue)
    ]
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]

    assert len(loops) == 1
    assert ways_out == []
    assert calls == ["key_digest(key)", "hmac.compare_digest(known, digest)"]
    assert comparisons == []


def test_digests_have_one_length_whatever_the_keys_length():
    assert {len(key_digest("x" * length)) for length in (0, 1, 31, 32, 33, 10_000)} == {32}


def test_scopes_are_read_in_any_order():
    assert read_scopes("admin,read") == {Scope.ADMIN, Scope.READ}


def test_identities_with_the_same_rights_are_equal():
    one, other = (Identity("a", "acme", frozenset({Scope.READ}), b"salt") for _ in range(2))

    assert one == other
