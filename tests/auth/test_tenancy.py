"""Tenancy: whose namespaces a caller may use."""

from dataclasses import replace

import pytest

from kvstore.auth import LOCAL, Identity, Scope, Tenancy
from kvstore.errors import Forbidden
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.messages import OpenNamespace

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=16, dtype="float16")
PLAIN = Namespace("llama", LAYOUT)
ACME = Identity("engine", "acme", frozenset({Scope.READ, Scope.WRITE}), b"a" * 32)
OTHER = Identity("engine2", "other", frozenset({Scope.READ, Scope.WRITE}), b"o" * 32)


def test_the_server_fills_in_the_tenants_salt():
    assert Tenancy().claim(ACME, PLAIN) == replace(PLAIN, tenant_salt=ACME.salt)


def test_a_tenant_may_send_its_own_salt():
    own = replace(PLAIN, tenant_salt=ACME.salt)

    assert Tenancy().claim(ACME, own) == own


@pytest.mark.parametrize("salt", [OTHER.salt, b"a" * 31, b"a" * 33, b"\0"])
def test_a_salt_that_is_not_the_tenants_is_refused(salt):
    with pytest.raises(Forbidden, match="its salt is not the caller's"):
        Tenancy(["*"]).claim(ACME, replace(PLAIN, tenant_salt=salt))


def test_a_refusal_does_not_show_a_salt():
    with pytest.raises(Forbidden) as caught:
        Tenancy().claim(ACME, replace(PLAIN, tenant_salt=OTHER.salt))

    assert "aaaa" not in str(caught.value)
    assert "oooo" not in str(caught.value)


def test_the_operator_chooses_salts():
    chosen = replace(PLAIN, tenant_salt=b"any")

    assert Tenancy().claim(LOCAL, chosen) == chosen
    assert Tenancy().claim(LOCAL, PLAIN) == PLAIN


@pytest.mark.parametrize("models", [["llama"], ["other", "llama"], ["*"]])
def test_a_public_model_has_a_namespace_without_salt(models):
    assert Tenancy(models).claim(ACME, PLAIN, is_public=True) == PLAIN


@pytest.mark.parametrize("models", [[], ["other"], ["Llama"], ["lla*"]])
def test_a_model_that_is_not_named_is_not_public(models):
    with pytest.raises(Forbidden, match="not public here"):
        Tenancy(models).claim(ACME, PLAIN, is_public=True)


def test_a_public_namespace_has_no_salt():
    with pytest.raises(Forbidden, match="send no salt"):
        Tenancy(["*"]).claim(ACME, replace(PLAIN, tenant_salt=ACME.salt), is_public=True)


def test_a_tenant_uses_its_own_namespaces_alone():
    own, foreign = (replace(PLAIN, tenant_salt=who.salt) for who in (ACME, OTHER))
    tenancy = Tenancy()

    assert tenancy.admits(ACME, own)
    assert not tenancy.admits(ACME, foreign)
    assert not tenancy.admits(ACME, PLAIN)
    assert not tenancy.admits(ACME, None)


def test_a_shared_namespace_is_used_where_its_model_is_public():
    assert Tenancy(["llama"]).admits(ACME, PLAIN)
    assert Tenancy(["*"]).admits(OTHER, PLAIN)
    assert not Tenancy(["mistral"]).admits(ACME, PLAIN)
    assert not Tenancy(["*"]).admits(ACME, replace(PLAIN, tenant_salt=OTHER.salt))
    assert not Tenancy(["*"]).admits(ACME, None)


def test_the_operator_uses_every_namespace_there_is():
    assert Tenancy().admits(LOCAL, replace(PLAIN, tenant_salt=OTHER.salt))
    assert not Tenancy().admits(LOCAL, None)


def test_no_text_form_of_a_namespace_or_of_its_opening_shows_the_salt():
    namespace = replace(PLAIN, tenant_salt=b"planted salt")

    shown = f"{namespace!r} {namespace} {OpenNamespace(namespace)!r}"

    assert "planted" not in shown
    assert "llama" in shown
