"""What is no request, or no sensible one: answered with 4xx or a closed connection, never with 5xx."""

import asyncio
import json
import random
import sys
from collections import Counter

import pytest

from kvstore.drill.store_process import Footprint
from kvstore.http.limits import Limits
from kvstore.http.routes import ROUTES
from tests.http.http_store import BLOCK_BYTES, framed, hex_keys, http_store, long_chain, payload
from tests.http.raw_client import RawClient, head

CHAIN = long_chain(3)
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}
WORDS = [
    b"GET",
    b"PUT",
    b"HEAD",
    b"POST",
    b"DELETE",
    b"OPTIONS",
    b"CONNECT",
    b"PRI",
    b"*",
    b"/",
    b"//",
    b"/healthz",
    b"/v1/match",
    b"/v1/store",
    b"/v1/../healthz",
    b"http://evil.example/healthz",
    b"evil.example:443",
    b"?a=b&a",
    b"%00",
    b"%2e%2e",
    b"#",
    b" ",
    b"\t",
    b"\0",
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/9",
    b":",
    b"Host: h",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 5, 5",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"5\r\nabcde\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"Trailer: a",
    b"Expect: 100-continue",
    b"Upgrade: websocket",
    b"Upgrade: h2c",
    b"Connection: Upgrade",
    b"Connection: close",
    b"Content-Encoding: gzip",
    b"Authorization: Bearer \xff",
    b"Sec-WebSocket-Key: a",
    b"KVStore-Checksum: \x80",
    b"A: " + b"a" * 5000,
    b"\x16\x03\x01\x02\x00",
    b"{}",
    b"[]",
    b"\xff\xfe",
]


def valid_requests():
    path = f"/v1/blocks/{ABOUT['namespace']}/{ABOUT['keys'][0]}"
    body = json.dumps(ABOUT).encode()
    store = framed(ABOUT, b"".join(payload(key) for key in CHAIN.keys))
    return [
        head("GET", "/healthz").encode(),
        head("GET", path).encode(),
        head("PUT", path, Content_Length=BLOCK_BYTES).encode() + payload(CHAIN.keys[0]),
        head("PUT", path, Transfer_Encoding="chunked").encode()
        + b"2000\r\n"
        + payload(CHAIN.keys[0])
        + b"\r\n0\r\n\r\n",
        head("POST", "/v1/match", Content_Length=len(body)).encode() + body,
        head("POST", "/v1/fetch", Content_Length=len(body)).encode() + body,
        head("POST", "/v1/store", Content_Length=len(store)).encode() + store,
    ]


def mutated(data, rng):
    """Return bytes with a few spots changed, cut out, doubled, or replaced by words of HTTP."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), 400) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.choice(WORDS)
            case 1:
                del data[at : at + rng.choice([1, 2, 10, 100])]
            case 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                data[at:at] = data[at : at + rng.choice([1, 10, 100])]
            case _:
                del data[at:]
    return bytes(data)


def made_up(rng):
    return b"".join(rng.choice(WORDS) + rng.choice([b"", b" ", b"\r\n"]) for _ in range(rng.randint(1, 30)))


async def tell(face, data):
    """Send bytes and hear all answers, until the server waits no longer for more."""
    async with RawClient.connected(face) as raw:
        await raw.say(data)
        heard = await raw.hear_all()
    return [int(piece[2:5]) for piece in heard.split(b"HTTP/1.")[1:] if piece[2:5].isdigit()]


@pytest.mark.parametrize("which", ["mutated", "made up"])
async def test_what_is_no_request_is_never_a_failure(which):
    rng = random.Random(f"http {which}")
    quick = Limits(header_s=0.4, idle_s=0.4, stall_s=0.4)
    seen = Counter()
    async with http_store(limits=quick) as store, store.client() as client:
        await client.open()
        valid = valid_requests()
        for request in valid:
            assert all(status < 300 or status == 404 for status in await tell(store.face, request))
        before = Footprint.of("self")
        # Most of the time is waiting until the server gives up on a request, so many wait together.
        for _ in range(6):
            batch = [
                mutated(rng.choice(valid), rng) if which == "mutated" else made_up(rng) for _ in range(250)
            ]
            for data, statuses in zip(
                batch, await asyncio.gather(*(tell(store.face, data) for data in batch)), strict=True
            ):
                assert all(status < 500 for status in statuses), (statuses, data)
                seen.update(statuses)
        assert (await client.get("/healthz")).status == 200
        after = Footprint.of("self")
        assert after.descriptors <= before.descriptors + 2
        assert ({200, 400, 404} if which == "mutated" else {400}) <= set(seen)
        assert store.face._num_requests == 0


def mangled(value, rng):
    """Return JSON like ``value`` with something of it changed."""
    strange = [
        None,
        True,
        0,
        -1,
        1.5,
        1e308,
        1 << 70,
        "",
        "0" * 64,
        "é\0",
        [],
        [[]],
        {},
        {"a": 1},
        [None] * 50,
    ]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(3):
            case 0:
                del changed[name]
            case 1:
                changed[rng.choice(["x", name.upper(), "start", "part"])] = rng.choice(strange)
            case _:
                changed[name] = mangled(value[name], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        return [*value[:-1], mangled(value[-1], rng)]
    return rng.choice(strange)


async def test_json_that_makes_no_sense_is_never_a_failure(store, client):
    rng = random.Random("json")
    bodies = {
        "/v1/namespaces": {"model": "m", "layout": {"dtype": "uint8", "num_layers": 1, "block_tokens": 4}},
        "/v1/admin/check": {"sample_blocks": 3},
        "/v1/admin/epoch": {"model": "x"},
        "/v1/admin/flush": {"timeout_s": 0.1},
    }
    paths = [route.path for route in ROUTES if route.body is not None]
    for _ in range(1500):
        path = rng.choice(paths)
        body = mangled(bodies.get(path, {**ABOUT, "start": 0, "part": [0, 1, 0, 1]}), rng)
        answer = await client.ask("POST", path, json=body)
        assert answer.status < 500, (path, body, answer.body)
        answer = await client.ask("POST", "/v1/store", data=framed(mangled(ABOUT, rng)))
        assert answer.status < 500, (body, answer.body)
    assert store.counters.errors["internal"] == 0


class Watch:
    """Notes files that are opened and addresses that are looked up or connected to, while it is on."""

    EVENTS = ("open", "os.listdir", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "import")

    def __init__(self):
        self.seen = []
        self.is_on = False
        sys.addaudithook(self._note)

    def _note(self, event, values):
        if self.is_on and event in self.EVENTS:
            self.seen.append((event, values))


async def test_names_that_look_like_paths_or_addresses_open_nothing(client):
    names = ("../../etc/passwd", "/tmp/x", "http://127.0.0.1:1/", "file:///etc/passwd", "a\0b", "x" * 4096)
    watch = Watch()
    watch.is_on = True
    for text in names:
        fields = dict.fromkeys(("weights", "tokenizer", "adapter", "rope"), text)
        assert (await client.post("/v1/namespaces", model=text, layout=_LAYOUT, **fields)).status == 200
        assert (await client.post("/v1/admin/epoch", model=text)).status == 200
        assert (await client.get("/healthz", headers={"Host": "evil.example:80"})).status == 200
    assert (await client.ask("GET", "/v1/blocks/..%2f..%2fetc/passwd")).status == 400
    watch.is_on = False

    assert watch.seen == []


_LAYOUT = {
    "dtype": "uint8",
    "num_layers": 1,
    "block_tokens": 4,
    "num_kv_heads": 1,
    "head_dim": 1024,
    "kv_planes": 1,
}
