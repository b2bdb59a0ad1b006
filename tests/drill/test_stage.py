"""Stage: the drill must be able to fail. Each promise is broken once, and the ledger must say so."""

import time

import numpy as np

from kvstore.client import KVStore
from kvstore.drill.blocks import payloads_of
from kvstore.drill.load import Load
from kvstore.drill.raw_client import RawClient
from kvstore.drill.slab_surgery import SlabFile
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import Footprint, wait_until
from kvstore.link import unix_dial


def test_a_sound_store_breaks_no_promise(stage: Stage) -> None:
    stage.fill_durable()
    stage.note_base()
    with Load(stage):
        stage.restart()
    stage.verify()
    stage.verify_footprint()

    report = stage.ledger.report
    assert report.notes == []
    assert report.blocks_served >= 16


def test_one_wrong_byte_that_is_served_is_counted(stage: Stage) -> None:
    chain = stage.new_chain(3)
    payloads = payloads_of(chain, stage.block_bytes)
    payloads[1] = payloads[1].copy()
    payloads[1][12_345] ^= 1
    stage.client.put(chain, payloads)

    stage.get(chain)

    assert stage.ledger.report.wrong_bytes == 1


def test_blocks_of_two_keys_that_are_exchanged_are_counted_as_wrong(stage: Stage) -> None:
    chain = stage.new_chain(2)
    stage.client.put(chain, payloads_of(chain, stage.block_bytes)[::-1])

    stage.get(chain)

    assert stage.ledger.report.wrong_bytes > stage.block_bytes


def test_an_acknowledged_block_that_is_gone_is_counted_as_lost(stage: Stage) -> None:
    chain = stage.new_chain(4)
    assert stage.put_durable(chain)
    stage.client.drop(chain[3:])

    stage.verify()

    assert stage.ledger.report.lost == 1


def test_damage_that_the_drill_did_not_excuse_is_counted_as_lost(stage: Stage) -> None:
    chain = stage.new_chain(4)
    assert stage.put_durable(chain)
    slab = SlabFile(stage.ssd_folder)
    slots = slab.find(list(chain.keys), stage.block_bytes)
    slab.flip_bits(slots[chain.keys[1]], stage.block_bytes, count=1, rng=stage.rng)
    stage.empty_dram()

    stage.verify()

    assert (stage.ledger.report.lost, stage.ledger.report.wrong_bytes) == (1, 0)


def test_a_line_of_the_check_is_a_violation(stage: Stage) -> None:
    chain = stage.new_chain(1)
    assert stage.put_durable(chain)  # nobody looks at its bytes any more on their way to a disk
    with RawClient(unix_dial(stage.store.socket_path), stage.namespace) as raw:
        slot = raw.lease(chain).slots[0]
        np.frombuffer(raw.writing.slot(slot.offset, 1), np.uint8)[0] ^= 1

    stage.verify_state()

    assert "in dram is corrupt" in stage.ledger.report.notes[0]


def test_a_lease_that_is_left_is_a_violation(stage: Stage) -> None:
    chain = stage.new_chain(1)
    stage.put(chain)
    with RawClient(unix_dial(stage.store.socket_path), stage.namespace) as raw:
        raw.lease(chain)
        stage.verify_state()

    assert stage.ledger.report.notes == ["1 leases are left, nobody holds any"]


def test_descriptors_that_are_left_open_in_the_store_are_a_violation(stage: Stage) -> None:
    stage.verify()
    stage.note_base()
    held = [KVStore.connect(stage.store.socket_path) for _ in range(20)]
    for client in held:
        client.ping(timeout_s=30)  # connections that never greet are ended by the store itself
    pid, few = stage.store.process.pid, 20
    assert wait_until(lambda: Footprint.of(pid).descriptors > few, 5.0)

    stage.verify_footprint()

    for client in held:
        client.close()
    assert stage.ledger.report.violations == 1


def test_a_store_that_does_not_answer_is_a_violation(stage: Stage) -> None:
    stage.store.kill()

    stage.verify()

    assert "no answer" in stage.ledger.report.notes[0]


def test_a_frozen_store_makes_no_call_late(stage: Stage) -> None:
    chain = stage.new_chain(2)
    stage.put(chain)
    stage.store.pause()

    # What lies in its memory is read without asking until it has been silent for a second.
    give_up_s = time.monotonic() + 60
    while stage.get(chain).blocks:
        assert time.monotonic() < give_up_s

    stage.store.resume()
    assert stage.ledger.report.over_deadline == 0


def test_a_block_whose_bytes_lie_in_two_places_is_found_in_both_and_never_taken_for_one(stage: Stage) -> None:
    chain = stage.new_chain(2)
    assert stage.put_durable(chain)
    slab, keys = SlabFile(stage.ssd_folder), list(chain.keys)
    slots = slab.find(keys, stage.block_bytes)

    slab.copy(slots[keys[0]], slots[keys[1]], stage.block_bytes)

    assert slab.find(keys, stage.block_bytes) == {}
    assert slab.find_all(keys, stage.block_bytes) == {keys[0]: sorted(slots.values())}
