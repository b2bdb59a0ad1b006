"""Who gets into an engine: one key, tenants' keys, web pages, failures; and what the log says of it."""

import shutil

import aiohttp
import openai
import pytest
from huggingface_hub import AsyncInferenceClient

from kvstore.auth import KeyRecord, Keyring, Scope, key_digest
from kvstore.errors import InvalidConfig
from kvstore.gate import FailureLimit, Gate
from kvstore.keyring_file import add_key, create_keyring
from kvstore.secret_source import SecretSource
from kvstore_engine_adapter.faces.engine_doors import KEY_VARIABLE, DoorOptions, EngineDoors
from kvstore_engine_adapter.faces.http_face import FaceDoors
from tests.engine.faces.face_server import face_server
from tests.tiers.certificates import Authority

KEY = "sk-a-secret-of-the-house"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def doors_of(**options):
    return EngineDoors.make(DoorOptions(**options), environ={})


@pytest.fixture
async def locked(lively):
    made = doors_of(api_key=KEY)
    doors = FaceDoors(gate=made.doors.gate, has_tenants=made.has_tenants)
    async with face_server(lively, doors=doors) as server:
        yield server


async def test_the_key_lets_the_official_clients_in(locked):
    async with locked.async_openai(api_key=KEY) as client:
        assert (await client.chat.completions.create(**ASK)).usage.completion_tokens <= 2
    async with AsyncInferenceClient(locked.url, token=KEY) as hf:
        assert isinstance(await hf.text_generation("hello", max_new_tokens=2), str)


@pytest.mark.parametrize("key", ["", "sk-wrong", KEY + "x", KEY[:-1], "é"])
async def test_another_key_or_none_is_401_in_openais_shape(locked, caplog, key):
    async with aiohttp.ClientSession(locked.url) as session:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with session.post("/v1/chat/completions", json=ASK, headers=headers) as response:
            body = await response.json()
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert body["error"]["code"] == "invalid_api_key"
    assert KEY not in str(body) + caplog.text
    if key:
        assert key not in str(body) + caplog.text


async def test_the_official_client_sees_an_authentication_error(locked):
    async with locked.async_openai(api_key="sk-wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_every_route_but_health_wants_the_key(locked):
    async with aiohttp.ClientSession(locked.url) as session:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/responses"),
            ("GET", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("GET", "/v1/sessions"),
            ("GET", "/v1/sessions/x"),
            ("GET", "/v1/models"),
            ("POST", "/generate"),
            ("POST", "/generate_stream"),
            ("POST", "/"),
            ("GET", "/info"),
            ("GET", "/stats"),
            ("GET", "/nothing"),
            ("PATCH", "/v1/models"),
        ):
            async with session.request(method, path) as response:
                assert response.status == 401, path
        for path in ("/health", "/healthz"):
            async with session.get(path) as response:
                assert response.status == 200


async def test_many_failures_from_one_address_are_429_and_a_valid_key_is_let_in(lively):
    keyring = Keyring(b"s" * 32, [KeyRecord("k", "house", frozenset(Scope), key_digest(KEY))])
    gate = Gate(lambda: keyring, failures=FailureLimit(burst=2, per_s=0.001))
    async with (
        face_server(lively, doors=FaceDoors(gate=gate)) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        found = []
        for _ in range(3):
            async with session.get("/v1/models") as response:
                found.append(response.status)
                headers, body = response.headers, await response.json()
        assert found == [401, 401, 429]
        assert int(headers["Retry-After"]) >= 1
        assert body["error"]["code"] == "rate_limit_exceeded"
        async with session.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 200


async def test_stats_are_for_admins_where_keys_are_of_tenants(lively):
    keyring = Keyring(
        b"s" * 32,
        [
            KeyRecord("a", "house", frozenset({Scope.ADMIN}), key_digest("admin")),
            KeyRecord("b", "house", frozenset({Scope.WRITE}), key_digest("user")),
        ],
    )
    async with (
        face_server(lively, doors=FaceDoors(gate=Gate(lambda: keyring))) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        found = {}
        for key in ("admin", "user"):
            for path in ("/stats", "/v1/models"):
                async with session.get(path, headers={"Authorization": f"Bearer {key}"}) as response:
                    found[key, path] = response.status
    assert found == {
        ("admin", "/stats"): 200,
        ("admin", "/v1/models"): 403,
        ("user", "/stats"): 403,
        ("user", "/v1/models"): 200,
    }


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "engine:8000"}]
)
async def test_what_a_web_page_could_have_sent_is_refused_where_there_is_no_key(server, headers):
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.post("/v1/chat/completions", json=ASK, headers=headers) as response,
    ):
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "forbidden"


def test_the_key_comes_from_an_option_a_file_or_the_environment(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\nnot this\n")
    for options, environ in (
        (DoorOptions(api_key=KEY), {}),
        (DoorOptions(api_key_file=file), {}),
        (DoorOptions(), {KEY_VARIABLE: KEY}),
        (DoorOptions(api_key=KEY), {KEY_VARIABLE: "another"}),
        (DoorOptions(api_key_file=file), {KEY_VARIABLE: "another"}),
    ):
        made = EngineDoors.make(options, environ)
        assert not made.has_tenants
        assert made.doors.gate._keyring().identify(KEY) is not None
        assert made.doors.gate._keyring().identify("another") is None
    assert EngineDoors.make(DoorOptions(), {}).doors.gate._keyring is None


@pytest.mark.parametrize("key", ["", "a b", "a\tb", "é", "x" * 4097, "a\nb"])
@pytest.mark.parametrize("place", ["option", "environment"])
def test_a_key_that_no_header_carries_is_refused_without_being_shown(key, place):
    options = DoorOptions(api_key=key) if place == "option" else DoorOptions()
    environ = {KEY_VARIABLE: key} if place == "environment" else {}
    with pytest.raises(InvalidConfig, match="printable ASCII") as refused:
        EngineDoors.make(options, environ)
    assert not key or key not in str(refused.value)
    assert KEY not in repr(DoorOptions(api_key=KEY))


def test_several_places_of_keys_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="--api-key and --api-key-file exclude each other"):
        doors_of(api_key=KEY, api_key_file=tmp_path / "key")


@pytest.fixture(scope="module")
def tls_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    certificate = Authority(folder / "authority").sign("engine", alternative="IP:127.0.0.1")
    shutil.copy(certificate.cert, folder / "tls.crt")
    shutil.copy(certificate.key, folder / "tls.key")
    return folder


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_off_loopback_a_key_and_tls_are_both_required(host, tls_folder):
    with pytest.raises(InvalidConfig, match=r"--api-key \(or .*\) and --tls-folder"):
        doors_of(host=host)
    with pytest.raises(InvalidConfig, match=r"give --tls-folder, or listen on 127\.0\.0\.1"):
        doors_of(host=host, api_key=KEY)
    with pytest.raises(InvalidConfig, match="give --api-key"):
        doors_of(host=host, tls_folder=tls_folder)
    assert doors_of(host=host, api_key=KEY, tls_folder=tls_folder).doors.tls is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1"])
def test_on_loopback_neither_is(host):
    assert doors_of(host=host).doors.tls is None


def test_a_keyring_that_others_may_write_is_refused(tmp_path):
    path = tmp_path / "keys"
    create_keyring(path)
    add_key(path, "amy", tenant="house", scopes=frozenset({Scope.WRITE}))
    assert doors_of(api_keys=SecretSource(file=path)).has_tenants
    path.chmod(0o666)
    with pytest.raises(InvalidConfig, match=r"engine: --api-keys: file:.*others may write"):
        doors_of(api_keys=SecretSource(file=path))
