"""An engine's doors as a process: the key from the environment, TLS, tenants; no text shows a key."""

import os
import shutil
import ssl

import httpx2
import openai
import pytest

from kvstore.auth import Scope
from kvstore.keyring_file import add_key, create_keyring, remove_key
from tests.engine.engine_process import engine
from tests.tiers.certificates import Authority

KEY = "sk-a-secret-of-the-house"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def client_of(process, key, **options):
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key=key, max_retries=0, **options)


def test_the_key_of_the_environment_is_wanted_and_never_shown(tiny_gguf):
    environ = os.environ | {"KVSTORE_ENGINE_API_KEY": KEY}
    with engine(tiny_gguf, environ=environ) as process:
        with client_of(process, KEY) as client:
            assert client.chat.completions.create(**ASK).usage.completion_tokens <= 2
        with client_of(process, "sk-wrong") as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(**ASK)
        status, errors = process.stop()
    assert status == 0
    assert KEY not in errors + str(process.event)
    assert "sk-wrong" not in errors


def test_off_loopback_it_serves_with_a_key_over_tls(tiny_gguf, tmp_path):
    authority = Authority(tmp_path / "authority")
    certificate = authority.sign("engine", alternative="IP:127.0.0.1")
    folder = tmp_path / "tls"
    folder.mkdir()
    shutil.copy(certificate.cert, folder / "tls.crt")
    shutil.copy(certificate.key, folder / "tls.key")
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    options = ("--host", "0.0.0.0", "--tls-folder", folder, "--api-key-file", key_file)
    with engine(tiny_gguf, *options) as process:
        assert process.url.startswith("https://0.0.0.0:")
        process.event["url"] = process.url.replace("0.0.0.0", "127.0.0.1")
        trusting = ssl.create_default_context(cafile=str(authority.own.cert))
        with (
            httpx2.Client(verify=trusting) as http,
            client_of(process, KEY, http_client=http) as client,
        ):
            stream = client.chat.completions.create(**ASK, stream=True)
            assert list(stream)[-1].choices[0].finish_reason is not None
        with client_of(process, KEY) as client, pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(**ASK)
        plain = process.url.replace("https", "http")
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"{plain}/health")
        assert process.stop()[0] == 0


def list_models_forever(client):
    while True:
        client.models.list()


def test_tenants_of_a_keyring_have_sessions_of_their_own_until_their_key_is_gone(tiny_gguf, tmp_path):
    keyring = tmp_path / "keys"
    create_keyring(keyring)
    amy, bob = (
        add_key(keyring, name, tenant=f"house-{name}", scopes=frozenset({Scope.WRITE}))
        for name in ("amy", "bob")
    )
    with (
        engine(tiny_gguf, "--api-keys", f"file:{keyring}") as process,
        client_of(process, amy) as amys,
        client_of(process, bob) as bobs,
    ):
        kept = amys.responses.create(model="tiny", input="hello", max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            bobs.responses.retrieve(kept.id)
        assert amys.responses.retrieve(kept.id).id == kept.id
        remove_key(keyring, "amy")
        with pytest.raises(openai.AuthenticationError):
            list_models_forever(amys)
        assert bobs.models.list().data[0].id == "tiny"
