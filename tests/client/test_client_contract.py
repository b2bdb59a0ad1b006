"""What every client promises, whichever way it reaches a store."""

import contextlib
import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore import Hints, KVLayout, MissReason, Namespace, Part, PrefixChain, PutResult
from kvstore.checksum import checksum
from kvstore.errors import InvalidRequest
from kvstore.keys import BlockKey
from tests.client.conftest import in_shared_memory
from tests.client.facade import Face

Payloads = npt.NDArray[np.uint8]


async def test_what_was_never_put_is_a_miss_with_a_reason(guest: Face, new_chain: PrefixChain) -> None:
    found = await guest.match(new_chain)

    assert (found.blocks, found.tiers, found.reason) == (0, (), MissReason.NEVER_SEEN)


async def test_what_was_put_is_matched_and_fetched_exactly(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    put = await guest.put(new_chain, payloads)
    found = await guest.match(new_chain)
    buffers = np.zeros_like(payloads)
    fetched = await guest.fetch_into(new_chain, buffers)

    assert put == PutResult(stored=8, present=0, dropped=0)
    assert (found.blocks, set(found.tiers), found.reason) == (8, {"dram"}, None)
    assert (fetched.blocks, set(fetched.origins), fetched.reason) == (8, {"dram"}, None)
    assert fetched.checksums == tuple(checksum(row) for row in payloads)
    assert np.array_equal(buffers, payloads)


async def test_get_returns_one_array_per_stored_leading_block(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:3], payloads[:3])

    blocks = await guest.get(new_chain)

    assert len(blocks) == 3
    assert np.array_equal(np.stack(blocks), payloads[:3])


async def test_a_fetch_ends_at_the_first_block_that_is_not_stored(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:5], payloads[:5])

    fetched = await guest.fetch_into(new_chain, np.zeros_like(payloads))

    assert (fetched.blocks, fetched.reason) == (5, MissReason.NEVER_SEEN)


async def test_present_blocks_are_not_written_again(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:5], payloads[:5])

    put = await guest.put(new_chain, np.concatenate([np.zeros_like(payloads[:5]), payloads[5:]]))

    assert put == PutResult(stored=3, present=5, dropped=0)
    assert np.array_equal(np.stack(await guest.get(new_chain)), payloads)


async def test_a_gap_is_filled_and_the_blocks_behind_it_count_as_present(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[5:], payloads[5:])

    put = await guest.put(new_chain, payloads)

    assert put == PutResult(stored=5, present=3, dropped=0)
    assert (await guest.match(new_chain)).blocks == 8


async def test_a_continued_chain_is_found_from_its_beginning(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:4], payloads[:4])
    await guest.put(new_chain[4:], payloads[4:])

    assert (await guest.match(new_chain)).blocks == 8


async def test_blocks_beyond_the_room_are_dropped_from_the_end(client: Face) -> None:
    namespace = Namespace("big", KVLayout.opaque(block_bytes=15 << 18, block_tokens=4))
    await client.open_namespace(namespace)
    chain = namespace.chain(range(4 * 8))
    payload = np.zeros(8 * (15 << 18), np.uint8)

    put, timeout_s = PutResult(stored=0, present=0, dropped=8), 0.5
    while put.dropped == 8 and timeout_s < 60:  # a busy machine needs longer for the first of them
        put = await client.put(chain, payload, timeout_s=timeout_s)
        timeout_s *= 2

    assert put.stored + put.present + put.dropped == 8
    assert 0 < put.dropped < 8
    assert len(put.doubtful) == put.dropped
    assert (await client.match(chain)).blocks == put.stored + put.present


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "array", "tensor", "typed"])
async def test_any_contiguous_buffer_is_a_payload(
    guest: Face, new_chain: PrefixChain, payloads: Payloads, kind: str
) -> None:
    made = {
        "bytes": lambda: payloads.tobytes(),
        "bytearray": lambda: [bytearray(row) for row in payloads],
        "memoryview": lambda: [row.data for row in payloads],
        "array": lambda: list(payloads),
        "tensor": lambda: torch.from_numpy(payloads.copy()).view(torch.bfloat16),
        "typed": lambda: payloads.view(np.float32).reshape(8, 2, -1),
    }[kind]()

    assert (await guest.put(new_chain, made)).stored == 8

    assert np.array_equal(np.stack(await guest.get(new_chain)), payloads)


async def test_blocks_are_fetched_into_tensors_and_bytearrays(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain, payloads)
    tensor = torch.zeros(8, payloads.shape[1] // 2, dtype=torch.bfloat16)
    arrays = [bytearray(payloads.shape[1]) for _ in range(8)]

    into_tensor = await guest.fetch_into(new_chain, tensor)
    into_arrays = await guest.fetch_into(new_chain, arrays)

    assert (into_tensor.blocks, into_arrays.blocks) == (8, 8)
    assert np.array_equal(tensor.view(torch.uint8).numpy(), payloads)
    assert b"".join(arrays) == payloads.tobytes()


@pytest.mark.parametrize(
    "buffers",
    [
        [b"x"] * 8,
        [bytes(64 << 10)] * 8,
        [bytearray(64 << 10)] * 7,
        bytearray(5),
        np.zeros((8, 2, 64 << 10), np.uint8)[:, 0],
        3,
        [None] * 8,
    ],
    ids=["sizes", "read-only", "count", "total", "strided", "number", "none"],
)
async def test_buffers_that_do_not_fit_are_refused_before_anything_is_asked(
    guest: Face, chain: PrefixChain, buffers: object
) -> None:
    with pytest.raises(InvalidRequest):
        await guest.fetch_into(chain, buffers)


async def test_a_payload_of_the_wrong_size_is_refused_with_what_was_expected(
    guest: Face, chain: PrefixChain
) -> None:
    with pytest.raises(InvalidRequest, match=r"payloads: 10 bytes, expected 8 blocks of 65536 bytes"):
        await guest.put(chain, b"x" * 10)


async def test_a_payload_that_differs_from_its_checksum_is_not_stored(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    sums = [checksum(row) for row in payloads]
    sums[3] ^= 1

    put = await guest.put(new_chain, payloads, checksums=sums)

    assert (put.stored, put.dropped) == (3, 5)
    assert (await guest.match(new_chain)).blocks == 3


async def test_a_chain_of_a_namespace_that_is_not_open_is_refused(guest: Face, namespace: Namespace) -> None:
    with pytest.raises(InvalidRequest, match="open_namespace"):
        await guest.match(namespace.at_epoch(1).chain(range(32)))


async def test_a_chain_with_too_many_keys_is_refused(guest: Face, namespace: Namespace) -> None:
    with pytest.raises(InvalidRequest, match="limit 10000"):
        await guest.match(namespace.chain(range(4 * 10_001)))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([16], "chain: key 0 of 1 has 16 bytes, expected 32: name blocks by"),
        ([32, 48, 16], "chain: key 1 of 3 has 48 bytes, expected 32"),
        ([32] * 70 + [31], "chain: key 70 of 71 has 31 bytes, expected 32"),
    ],
    ids=["short", "lengths that add up", "many"],
)
async def test_a_key_that_is_not_as_long_as_a_digest_is_refused_by_every_call(
    guest: Face, chain: PrefixChain, payloads: Payloads, lengths: list[int], message: str
) -> None:
    keys = tuple(BlockKey(bytes([at]) * length) for at, length in enumerate(lengths))
    wrong = PrefixChain(chain.namespace, keys, chain.block_tokens)
    buffers = np.zeros((len(keys), payloads.shape[1]), np.uint8)

    for call in (
        guest.match(wrong),
        guest.match(wrong, lease=True),
        guest.exists(wrong),
        guest.fetch_into(wrong, buffers),
        guest.get(wrong),
        guest.put(wrong, buffers),
        guest.prefetch(wrong),
        guest.lease(wrong),
        guest.hint(wrong, Hints(priority=1)),
        guest.drop(wrong),
        guest.demote(wrong),
        guest.why(wrong),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await call
    assert guest.client_stats().protocol_errors == 0
    assert (await guest.match(chain[:0])).reason is None


async def test_ten_thousand_keys_are_matched_in_one_request(client: Face, namespace: Namespace) -> None:
    assert (await client.match(namespace.chain(range(4 * 10_000)))).blocks == 0


async def test_an_empty_chain_is_answered(guest: Face, chain: PrefixChain) -> None:
    assert (await guest.match(chain[:0])).blocks == 0
    assert (await guest.put(chain[:0], b"")) == PutResult(0, 0, 0)
    assert await guest.get(chain[:0]) == []


async def test_another_salt_never_sees_the_blocks(
    client: Face, chain: PrefixChain, payloads: Payloads, namespace: Namespace
) -> None:
    other = Namespace(namespace.model, namespace.layout, tenant_salt=b"other")
    await client.open_namespace(other)
    await client.put(chain, payloads)

    assert (await client.match(other.chain(range(32)))).blocks == 0


async def test_parts_of_a_block_are_stored_and_fetched_apart(client: Face) -> None:
    layout = KVLayout("float16", num_layers=4, block_tokens=4, num_kv_heads=2, head_dim=8)
    namespace = Namespace("parts", layout)
    await client.open_namespace(namespace)
    chain, upper, lower = namespace.chain(range(8)), Part(0, 2, 0, 2), Part(2, 4, 0, 2)
    half = np.arange(2 * layout.part_bytes(upper), dtype=np.uint16).astype(np.uint8)

    await client.put(chain, half, part=upper)

    assert (await client.match(chain, part=upper)).blocks == 2
    assert (await client.match(chain, part=lower)).blocks == 0
    assert np.array_equal(np.concatenate(await client.get(chain, part=upper)), half)


async def test_dropped_blocks_are_a_miss_with_that_reason(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain, payloads)

    dropped = await guest.drop(new_chain)

    assert dropped == 8
    assert (await guest.match(new_chain)).reason is MissReason.DROPPED


async def test_prefetch_counts_the_leading_blocks_in_the_top_tier(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:6], payloads[:6])

    assert await guest.prefetch(new_chain) == 6


async def test_control_calls_answer(client: Face, chain: PrefixChain, payloads: Payloads) -> None:
    await client.put(chain, payloads)

    await client.ping()

    assert await client.flush(5.0) is True
    assert (await client.stats())["puts_blocks"]["stored"] == 8
    assert await client.check(8) == []


@pytest.mark.parametrize("sample_blocks", [-1, 1_000_001, 1 << 64])
async def test_a_sample_that_no_check_takes_is_misuse(guest: Face, sample_blocks: int) -> None:
    with pytest.raises(InvalidRequest):
        await guest.check(sample_blocks)


async def test_a_closed_client_is_misuse(guest: Face, chain: PrefixChain) -> None:
    await guest.close()

    with pytest.raises(InvalidRequest, match="closed"):
        await guest.ping()


async def test_why_reports_on_every_block(guest: Face, new_chain: PrefixChain, payloads: Payloads) -> None:
    await guest.put(new_chain[:3], payloads[:3])

    reports = await guest.why(new_chain)

    assert [report.tiers for report in reports] == [("dram",)] * 3 + [()] * 5
    assert [report.key for report in reports] == list(new_chain.keys)
    assert reports[3].reason is MissReason.NEVER_SEEN


async def test_an_ended_epoch_is_told_as_the_reason(
    client: Face, namespace: Namespace, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)

    assert await client.advance_epoch(namespace.model) == 1

    assert (await client.match(chain)).reason is MissReason.OTHER_EPOCH
    put = await client.put(chain, payloads)
    assert (put.stored, put.present, put.dropped, put.reason) == (0, 0, 8, MissReason.OTHER_EPOCH)
    assert client.client_stats().unavailable == 0


@in_shared_memory
async def test_a_commit_after_the_epochs_end_says_that_it_ended(
    client: Face, namespace: Namespace, chain: PrefixChain
) -> None:
    async with await client.reserve(chain) as blocks:
        assert len(blocks) == 8
        await client.advance_epoch(namespace.model)
    result = blocks.result
    assert (result.stored, result.present, result.dropped) == (0, 0, 8)
    assert (result.reason, result.doubtful) == (MissReason.OTHER_EPOCH, tuple(range(8)))
    assert (await client.stats())["puts_blocks"]["dropped"] == 8

    async with await client.reserve(chain) as blocks:
        assert len(blocks) == 0
    assert blocks.result.reason is MissReason.OTHER_EPOCH


async def test_a_put_that_finds_no_room_says_so(client: Face, namespace: Namespace) -> None:
    async with contextlib.AsyncExitStack() as kept:
        for number in range(20):
            more = dataclasses.replace(namespace, weights=f"w{number}")
            await client.open_namespace(more)
            chain = more.chain(range(4 * 200))
            put = await client.put(chain, np.zeros((200, 64 << 10), np.uint8), timeout_s=5)
            if put.dropped:
                break
            await kept.enter_async_context(await client.lease(chain))
    assert put.reason is MissReason.NO_ROOM


@pytest.mark.parametrize("model", ["\ud800", "é" * 4096])
async def test_an_epoch_of_a_model_that_cannot_be_is_refused_before_it_is_sent(
    guest: Face, model: str
) -> None:
    with pytest.raises(InvalidRequest, match="model"):
        await guest.advance_epoch(model)
    assert (await guest.stats())["epochs"] == {}


async def test_namespaces_are_listed_without_their_salts(client: Face, namespace: Namespace) -> None:
    await client.open_namespace(Namespace("secret", namespace.layout, tenant_salt=b"salt"))
    await client.match(Namespace("secret", namespace.layout, tenant_salt=b"salt").chain(range(64)))

    listed = await client.namespaces()

    assert {(space.model, space.tenant_salt) for space in listed} >= {("secret", b"")}


async def test_demoting_without_a_tier_below_leaves_blocks_where_they_are(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)

    assert await client.demote(chain) == 0

    assert (await client.match(chain)).blocks == 8


async def test_opening_a_namespace_returns_the_one_to_use(guest: Face, namespace: Namespace) -> None:
    assert await guest.open_namespace(namespace) == namespace
    assert await guest.open_namespace(namespace, is_public=True) == namespace
    with pytest.raises(InvalidRequest, match="tenant_salt"):
        await guest.open_namespace(
            Namespace(namespace.model, namespace.layout, tenant_salt=b"s"), is_public=True
        )


async def test_single_blocks_are_put_and_got(guest: Face, new_chain: PrefixChain, payloads: Payloads) -> None:
    assert await guest.put_block(new_chain[:1], payloads[0])
    assert await guest.put_block(new_chain[:1], payloads[0])

    assert np.array_equal(await guest.get_block(new_chain[:1]), payloads[0])
    assert await guest.get_block(new_chain[1:2]) is None
    with pytest.raises(InvalidRequest, match="one is expected"):
        await guest.get_block(new_chain)


async def test_exists_answers_for_each_block_of_a_chain(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:3], payloads[:3])
    await guest.put(new_chain[5:6], payloads[5:6])

    assert await guest.exists(new_chain) == [True] * 3 + [False] * 2 + [True] + [False] * 2
    assert await guest.exists(new_chain[:0]) == []


async def test_exists_takes_any_keys_in_any_order(
    guest: Face, new_chain: PrefixChain, payloads: Payloads, namespace: Namespace
) -> None:
    await guest.put(new_chain[:3], payloads[:3])
    keys = [new_chain.keys[7], new_chain.keys[2], new_chain.keys[7], new_chain.keys[0], new_chain.keys[2]]

    assert await guest.exists(keys, namespace=namespace) == [False, True, False, True, True]
    with pytest.raises(InvalidRequest, match="need the namespace"):
        await guest.exists(keys)
    with pytest.raises(InvalidRequest, match="exists: key 0 of 1 has 5 bytes, expected 32"):
        await guest.exists([b"short"], namespace=namespace)


async def test_exists_answers_for_ten_thousand_blocks_and_refuses_more(
    client: Face, chain: PrefixChain, payloads: Payloads, namespace: Namespace
) -> None:
    await client.put(chain, payloads)
    longer = namespace.chain(range(4 * 10_000))

    assert await client.exists(longer) == [True] * 8 + [False] * 9_992
    with pytest.raises(InvalidRequest, match="limit 10000"):
        await client.exists(namespace.chain(range(4 * 10_001)))


async def test_exists_of_an_ended_epoch_is_no(
    client: Face, chain: PrefixChain, payloads: Payloads, namespace: Namespace
) -> None:
    await client.put(chain, payloads)
    await client.advance_epoch(namespace.model)

    assert await client.exists(chain) == [False] * 8


async def test_hints_reach_the_store_with_a_request_and_after_it(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    before = (await client.stats())["hinted_requests"]

    put = await client.put(chain, payloads, hints=Hints(output_tokens=40, priority=1))
    fetched = await client.fetch_into(chain, np.zeros_like(payloads), hints=Hints(next_use_s=30))
    got = await client.get(chain, hints=Hints(is_one_off=True))
    async with await client.lease(chain, hints=Hints(next_use_s=2.5)):
        pass
    is_heard = await client.hint(chain, Hints(ends_session=True))

    assert (put.stored, fetched.blocks, len(got), is_heard) == (8, 8, 8, True)
    assert (await client.stats())["hinted_requests"] == before + 5


async def test_another_policy_loses_no_block(client: Face, chain: PrefixChain, payloads: Payloads) -> None:
    await client.put(chain, payloads)

    before = await client.change_policy("lru")

    assert (before, (await client.stats())["policy"]) == ("gittins", "lru")
    assert np.array_equal(np.stack(await client.get(chain)), payloads)
    assert await client.change_policy(f"dram=arc, {chain.namespace.hex()}=fifo") == "lru"
    assert (await client.stats())["tiers"]["dram"]["namespace_policies"] == {chain.namespace.hex(): "fifo"}
    assert np.array_equal(np.stack(await client.get(chain)), payloads)
    for nothing in ("none", "nowhere=lru"):
        with pytest.raises(InvalidRequest, match=f"{nothing.partition('=')[0]}' "):
            await client.change_policy(nothing)
