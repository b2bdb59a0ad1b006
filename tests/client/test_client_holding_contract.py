"""What every client promises of leases, views and reservations, whichever way it reaches a store."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore import MissReason, Namespace, PrefixChain, PutResult
from kvstore.errors import InvalidRequest
from tests.client.conftest import in_shared_memory
from tests.client.facade import Face

Payloads = npt.NDArray[np.uint8]


async def test_a_match_leases_the_stored_blocks_in_the_same_call(
    guest: Face, new_chain: PrefixChain, payloads: Payloads
) -> None:
    await guest.put(new_chain[:5], payloads[:5])

    found = await guest.match(new_chain, lease=True)

    assert (found.blocks, set(found.tiers), found.reason) == (5, {"dram"}, MissReason.NEVER_SEEN)
    assert found.lease.chain == new_chain[:5]
    assert await guest.drop(new_chain) == 0
    assert (await guest.stats())["live_leases"] == 1
    async with found.lease:
        assert found.lease.is_valid()
        assert 0 < found.lease.remaining_s <= 30
    assert not found.lease.is_valid()
    assert await guest.drop(new_chain) == 5


async def test_a_match_without_anything_stored_has_an_empty_lease(
    guest: Face, new_chain: PrefixChain
) -> None:
    async with (await guest.match(new_chain, lease=True)).lease as lease:
        assert (lease.blocks, lease.reason) == (0, MissReason.NEVER_SEEN)
        assert await guest.view(lease) == []
        assert not await lease.renew()
    assert (await guest.stats())["live_leases"] == 0


@in_shared_memory
async def test_leased_blocks_stay_while_others_need_the_room(
    client: Face, chain: PrefixChain, payloads: Payloads, namespace: Namespace
) -> None:
    await client.put(chain, payloads)
    other = namespace.chain(range(10_000, 10_000 + 4 * 512))

    async with await client.lease(chain) as lease:
        for start in range(0, 512, 64):
            await client.put(other[start : start + 64], np.zeros(64 * (64 << 10), np.uint8))
        assert lease.is_valid()
        assert (await client.match(chain)).blocks == 8
        views = await client.view(lease)
        assert b"".join(views) == payloads.tobytes()
    assert (lease.tiers, lease.reason) == (("dram",) * 8, None)


@in_shared_memory
async def test_views_are_read_only_memory_of_the_store_itself(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)

    async with await client.lease(chain) as lease:
        first, again = await client.view(lease), await client.view(lease)
        arrays = [np.frombuffer(view, np.uint8) for view in first]

        assert all(view.readonly and view.format == "B" for view in first)
        assert all(np.array_equal(array, row) for array, row in zip(arrays, payloads, strict=True))
        assert [array.ctypes.data for array in arrays] == [
            np.frombuffer(view, np.uint8).ctypes.data for view in again
        ]
        assert all(array.ctypes.data % 4096 == 0 for array in arrays)
        with pytest.raises(ValueError, match="read-only"):
            arrays[0][0] = 1


@pytest.mark.filterwarnings("ignore:.*buffer is not writable:UserWarning")
@in_shared_memory
async def test_views_are_readable_as_tensors(client: Face, chain: PrefixChain, payloads: Payloads) -> None:
    await client.put(chain, payloads)

    async with await client.lease(chain) as lease:
        tensor = torch.frombuffer((await client.view(lease))[3], dtype=torch.bfloat16)

        assert np.array_equal(tensor.view(torch.uint8).numpy(), payloads[3])


@in_shared_memory
async def test_views_stay_readable_after_lease_and_client_have_ended(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)
    lease = await client.lease(chain)
    views = await client.view(lease)

    await lease.release()
    await client.close()

    assert bytes(views[7]) == payloads[7].tobytes()
    assert not lease.is_valid()


async def test_a_released_lease_has_no_views(guest: Face, new_chain: PrefixChain, payloads: Payloads) -> None:
    await guest.put(new_chain, payloads)
    lease = await guest.lease(new_chain)
    await lease.release()
    await lease.release()

    assert await guest.view(lease) == []
    assert not await lease.renew()
    assert guest.client_stats().ended_leases == 1
    assert (await guest.stats())["lease_events"].get("stale_releases", 0) == 0


async def test_a_renewed_lease_lasts_its_full_time_again(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)

    async with await client.lease(chain) as lease:
        ends_s = lease.grant.deadline_s
        assert await lease.renew()
        assert lease.grant.deadline_s > ends_s
        assert (await client.stats())["lease_events"]["renewed"] == 1


async def test_many_leases_are_held_at_a_time_beside_other_calls(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)

    leases = [await client.lease(chain[: 1 + at % 8]) for at in range(100)]

    assert (await client.stats())["live_leases"] == 100
    assert all(lease.is_valid() for lease in leases)
    assert np.array_equal(np.stack(await client.get(chain)), payloads)
    for lease in leases:
        await lease.release()
    while (await client.stats())["live_leases"]:
        pass


@in_shared_memory
async def test_reserved_blocks_are_written_in_place_and_committed(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain[2:4], payloads[2:4])

    async with await client.reserve(chain) as blocks:
        assert (await client.match(chain)).blocks == 0
        assert [block.position for block in blocks] == [0, 1, 4, 5, 6, 7]
        assert [block.key for block in blocks] == [chain.keys[at] for at in (0, 1, 4, 5, 6, 7)]
        assert all(block.array.ctypes.data % 4096 == 0 for block in blocks)
        for block in blocks:
            block.array[:] = payloads[block.position]

    assert blocks.result == PutResult(stored=6, present=2, dropped=0)
    assert np.array_equal(np.stack(await client.get(chain)), payloads)


@in_shared_memory
async def test_an_abandoned_reservation_leaves_nothing(client: Face, chain: PrefixChain) -> None:
    before = (await client.stats())["tiers"]["dram"]["used_bytes"]

    async def fail_half_way() -> Any:
        async with blocks:
            assert len(blocks) == 8
            raise ZeroDivisionError

    blocks = await client.reserve(chain)
    with pytest.raises(ZeroDivisionError):
        await fail_half_way()

    assert blocks.result.dropped == 8
    assert (await client.match(chain)).blocks == 0
    while (await client.stats())["tiers"]["dram"]["used_bytes"] != before:
        pass


@in_shared_memory
async def test_a_reservation_is_over_after_its_commit(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    async with await client.reserve(chain) as blocks:
        for block in blocks:
            block.buffer[:] = payloads[block.position].data
        assert (await blocks.commit()).stored == 8
        with pytest.raises(InvalidRequest, match="over"):
            await blocks.commit()
        await blocks.abandon()
        with pytest.raises(ValueError, match="released"):
            bytes(next(iter(blocks)).buffer)

    assert blocks.result.stored == 8


@in_shared_memory
async def test_a_reservation_of_present_blocks_has_none(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain, payloads)

    async with await client.reserve(chain) as blocks:
        assert len(blocks) == 0

    assert blocks.result == PutResult(stored=0, present=8, dropped=0)


@in_shared_memory
async def test_of_two_writers_of_a_block_one_stores_it(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    async with await client.reserve(chain) as blocks:
        await client.put(chain, payloads)
        for block in blocks:
            block.array[:] = payloads[block.position]

    assert (blocks.result.stored, blocks.result.present) == (0, 8)
    assert np.array_equal(np.stack(await client.get(chain)), payloads)


@in_shared_memory
async def test_without_a_gpu_pinning_for_cuda_says_why_not(client: Face) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    assert await client.register_with_cuda() == "PyTorch sees no CUDA device"
