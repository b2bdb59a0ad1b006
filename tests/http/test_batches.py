"""Many blocks in one request over HTTP: store and fetch, and how they end early."""

import json

import pytest

from kvstore.checksum import checksum
from kvstore.http import Limits
from tests.http.http_store import (
    BLOCK_BYTES,
    SPACE,
    framed,
    hex_keys,
    http_store,
    long_chain,
    payload,
    sum_text,
)
from tests.http.raw_client import RawClient, head, until


async def test_a_batch_comes_back_as_it_was_stored(client):
    chain = long_chain(5)
    stored = await client.store(chain, checksums=[sum_text(payload(key)) for key in chain.keys])
    head, payloads = await client.fetch(chain)

    assert stored.json == {"stored": 5, "present": 0, "dropped": 0, "doubtful": [], "reason": None}
    assert payloads == [payload(key) for key in chain.keys]
    assert head == {
        "blocks": 5,
        "length_bytes": BLOCK_BYTES,
        "checksums": [sum_text(data) for data in payloads],
        "origins": ["dram"] * 5,
        "reason": None,
    }


async def test_a_fetch_ends_before_the_first_block_that_is_missing(client):
    chain = long_chain(5)
    await client.store(chain[:2])
    await client.store(chain[3:], start=3, parent=chain.keys[2].hex())

    head, payloads = await client.fetch(chain)

    assert (head["blocks"], head["reason"], len(payloads)) == (2, "never_seen", 2)


async def test_a_fetch_of_nothing_is_an_empty_answer(client):
    chain = long_chain(3)
    head, payloads = await client.fetch(chain[:0])
    assert (head["blocks"], head["reason"], payloads) == (0, None, [])

    head, payloads = await client.fetch(chain)
    assert (head["blocks"], head["reason"], payloads) == (0, "never_seen", [])


async def test_a_store_leaves_what_is_there_as_it_is(client):
    chain = long_chain(6)
    await client.store(chain[:2])
    await client.store(chain[4:], start=4, parent=chain.keys[3].hex())

    again = await client.store(chain)

    assert again.json == {"stored": 2, "present": 4, "dropped": 0, "doubtful": [], "reason": None}
    assert (await client.fetch(chain))[1] == [payload(key) for key in chain.keys]


async def test_a_batch_of_several_windows_is_stored_whole():
    async with (
        http_store(blocks=200, high_water_ratio=1.0, low_water_ratio=1.0) as store,
        store.client() as client,
    ):
        await client.open()
        chain = long_chain(150)
        stored = await client.store(chain)
        _, payloads = await client.fetch(chain)

    assert stored.json["stored"] == 150
    assert payloads == [payload(key) for key in chain.keys]


async def test_a_store_without_room_says_which_blocks_are_not_stored():
    async with (
        http_store(blocks=70, high_water_ratio=1.0, low_water_ratio=1.0) as store,
        store.client() as client,
    ):
        await client.open()
        kept, chain = long_chain(20, first=5000), long_chain(150)
        await client.store(kept)
        await client.post("/v1/leases", namespace=kept.namespace.hex(), keys=hex_keys(kept))

        stored = await client.store(chain, timeout_s=0)

        assert stored.json == {
            "stored": 50,
            "present": 0,
            "dropped": 100,
            "doubtful": list(range(50, 150)),
            "reason": "no_room",
        }
        assert (await client.fetch(chain))[0]["blocks"] == 50


async def test_a_block_with_another_checksum_ends_a_store():
    chain = long_chain(70)
    checksums = [sum_text(payload(key)) for key in chain.keys]
    checksums[66] = "0" * 16
    async with http_store(blocks=200) as store, store.client() as client:
        await client.open()
        stored = await client.store(chain, checksums=checksums)
        head, _ = await client.fetch(chain)

    assert (stored.status, stored.code) == (400, "checksum_mismatch")
    assert "block 66" in stored.json["error"]["message"]
    assert head["blocks"] == 64


@pytest.mark.parametrize("missing_bytes", [1, BLOCK_BYTES, 2 * BLOCK_BYTES + 1])
async def test_a_store_that_is_cut_short_stores_no_half_block(client, missing_bytes):
    chain = long_chain(3)
    head = {"namespace": chain.namespace.hex(), "keys": hex_keys(chain)}
    data = framed(head, b"".join(payload(key) for key in chain.keys))[:-missing_bytes]

    stored = await client.ask("POST", "/v1/store", data=data)

    assert (stored.status, stored.code) == (400, "bad_request")
    assert (await client.fetch(chain))[0]["blocks"] == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"length_bytes": 1}, "bad_request"),
        ({"checksums": []}, "bad_request"),
        ({"checksums": ["x"]}, "bad_request"),
        ({"start": 1}, "bad_request"),
        ({"keys": ["0" * 64, "0" * 64]}, "bad_request"),
        ({"keys": ["0"]}, "bad_request"),
        ({"keys": "0" * 64}, "bad_request"),
        ({"namespace": "0" * 64}, "unknown_namespace"),
        ({"part": [0, 1, 0]}, "bad_request"),
        ({"part": [0, 9, 0, 1]}, "bad_request"),
        ({"more": 1}, "bad_request"),
        ({"timeout_s": -1}, "bad_request"),
    ],
)
async def test_a_head_that_makes_no_sense_is_refused(client, change, code):
    chain = long_chain(1)
    head = {"namespace": chain.namespace.hex(), "keys": hex_keys(chain), **change}
    answer = await client.ask("POST", "/v1/store", data=framed(head, payload(chain.keys[0])))
    assert answer.code == code


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\2\0\0\0[", b"\2\0\0\0[]", b"\xff\xff\xff\xff", b"\4\0\0\0null"]
)
async def test_a_body_without_a_head_is_refused(client, data):
    answer = await client.ask("POST", "/v1/store", data=data)
    assert answer.code in ("bad_request", "too_large")


async def test_bytes_after_the_last_block_are_refused(client):
    chain = long_chain(1)
    head = {"namespace": chain.namespace.hex(), "keys": hex_keys(chain)}
    answer = await client.ask("POST", "/v1/store", data=framed(head, payload(chain.keys[0]) + b"x"))
    assert (answer.status, answer.code) == (400, "bad_request")


async def test_a_batch_above_the_limit_is_refused_before_its_payloads():
    async with http_store(limits=Limits(max_batch_bytes=2 * BLOCK_BYTES)) as store, store.client() as client:
        await client.open()
        assert (await client.store(long_chain(2))).status == 200
        assert (await client.store(long_chain(3))).code == "too_large"
        chain = long_chain(3)
        fetched = await client.post("/v1/fetch", namespace=chain.namespace.hex(), keys=hex_keys(chain))
        assert fetched.code == "too_large"


async def test_a_damaged_block_shortens_a_fetch_and_is_dropped(store, client):
    chain = long_chain(4)
    await client.store(chain)
    _spoil(store, payload(chain.keys[2]))

    head, payloads = await client.fetch(chain)

    assert (head["blocks"], head["reason"]) == (2, "corrupt")
    assert payloads == [payload(key) for key in chain.keys[:2]]
    assert (await client.get_block(chain, 2)).json["reason"] == "corrupt"
    assert store.counters.damaged_blocks == 1


async def test_a_damaged_block_is_a_miss_for_a_get(store, client):
    chain = long_chain(1)
    await client.store(chain)
    _spoil(store, payload(chain.keys[0]))

    assert (await client.get_block(chain)).json["reason"] == "corrupt"
    assert (await client.put_block(chain)).json["stored"] == 1


def _spoil(store, data):
    """Flip one bit of the slot that holds these bytes, as bad memory does."""
    view = store.dram.arena.view
    for offset in range(view.format.slots_offset, view.format.total_bytes, BLOCK_BYTES):
        slot = view.slot(offset, BLOCK_BYTES)
        if checksum(slot) == checksum(data):
            slot[100] ^= 1
            return
    raise AssertionError("no slot holds these bytes")


async def test_a_store_into_an_epoch_that_ends_meanwhile_says_so(store, client):
    chain = long_chain(2)
    head_bytes = framed({"namespace": chain.namespace.hex(), "keys": hex_keys(chain)})
    body = b"".join(map(payload, chain.keys))
    async with RawClient.connected(store.face) as raw:
        await raw.say(head("POST", "/v1/store", Content_Length=len(head_bytes) + len(body)))
        await raw.say(head_bytes + body[:100])
        await until(lambda: store.dram.used_bytes > 0)
        await client.post("/v1/admin/epoch", model=SPACE.model)
        await raw.say(body[100:])
        status, answer = await raw.hear_answer()
    said = json.loads(answer)
    assert (status, said["stored"], said["present"], said["dropped"]) == (200, 0, 0, 2)
    assert (said["reason"], said["doubtful"]) == ("other_epoch", [0, 1])
    assert (await client.store(chain)).json["reason"] == "other_epoch"


@pytest.mark.parametrize(
    "hints",
    [{"priority": 9}, {"next_use_s": -1}, {"ends_session": 1}, {"output_tokens": 0.5}, {"unknown": 1}, []],
)
async def test_bad_hints_are_refused_and_nothing_is_stored(client, hints):
    chain = long_chain(2)
    stored = await client.store(chain, hints=hints)
    noted = await client.post("/v1/hints", namespace=SPACE.digest.hex(), keys=hex_keys(chain), hints=hints)

    assert (stored.status, stored.json["error"]["code"]) == (400, "bad_request")
    assert (noted.status, noted.json["error"]["code"]) == (400, "bad_request")
