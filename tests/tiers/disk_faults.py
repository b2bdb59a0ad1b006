"""A process under disk_shim: every write and sync fails once, or all of them are logged and lost in part.

``python -m tests.tiers.disk_faults sweep FOLDER ERRNO TEAR`` and ``... crash FOLDER SEED STATES``; prints one
line of JSON. The shim is preloaded by whoever starts it.
"""

import asyncio
import ctypes
import json
import os
import random
import shutil
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import block_id, payload, to_read, to_write

CAPACITY = 2 << 20
LENGTH = 20_000
NUMBERS = range(12)
HEAD = struct.Struct("<IIQQQII")
MayHold = dict[int, set[int | None]]


def soon() -> float:
    return time.monotonic() + 30


def tier_in(folder: Path) -> SsdTier:
    return SsdTier(folder, capacity_bytes=CAPACITY, io_threads=2)


async def put(tier: SsdTier, may_hold: MayHold, number: int, version: int) -> None:
    """Write one version of a block, and note what a later reader may find."""
    may_hold[number].add(version)
    (status,) = await tier.write([to_write(number, LENGTH, version=version)], deadline_s=soon())
    if status is WriteStatus.OK:
        may_hold[number] = {version}


async def put_neighbours(tier: SsdTier, may_hold: MayHold, numbers: Sequence[int], version: int) -> None:
    """Write several blocks in one call, so that those in slots that touch go by one system call."""
    requests = [to_write(number, LENGTH, version=version) for number in numbers]
    for number in numbers:
        may_hold[number].add(version)
    statuses = await tier.write(requests, deadline_s=soon())
    for number, status in zip(numbers, statuses, strict=True):
        if status is WriteStatus.OK:
            may_hold[number] = {version}


async def use(tier: SsdTier, may_hold: MayHold, dice: random.Random) -> int:
    """Write, replace, drop and read; returns how many reads gave bytes that were never put."""
    wrong = 0
    await asyncio.gather(*(put(tier, may_hold, number, 1) for number in NUMBERS[:6]))
    await put_neighbours(tier, may_hold, NUMBERS[5:10], 20)
    for version in (2, 3):
        for number in dice.sample(NUMBERS, 3):
            await put(tier, may_hold, number, version)
        gone = dice.choice(NUMBERS)
        may_hold[gone].add(None)
        await tier.drop([block_id(gone)])
        wrong += (await look(tier, may_hold, is_up=False))[0]
    return wrong


async def heals(tier: SsdTier, may_hold: MayHold) -> bool:
    """Say whether the tier takes a write again, soon after its breaker lets it."""
    for version in range(4, 14):
        await put(tier, may_hold, 0, version)
        if may_hold[0] == {version}:
            return True
        await asyncio.sleep(0.1)
    return False


async def look(tier: SsdTier, may_hold: MayHold, *, is_up: bool) -> tuple[int, int]:
    """Read every block: (wrong bytes, blocks that had to be there and were not)."""
    requests = [to_read(number, LENGTH) for number in NUMBERS]
    outcomes = await tier.read(requests, deadline_s=soon())
    wrong = lost = 0
    for number, request, outcome in zip(NUMBERS, requests, outcomes, strict=True):
        allowed = may_hold[number]
        if outcome.status is ReadStatus.OK:
            data = bytes(request.buffer[:LENGTH])
            known = [v for v in allowed if v is not None]
            wrong += data not in [payload(number + 1000 * v, LENGTH) for v in known]
        elif is_up and None not in allowed:
            lost += 1
    return wrong, lost


async def verify(folder: Path, may_hold: MayHold) -> dict[str, int]:
    """Open after the fault and look at everything."""
    (folder / "dirty").unlink(missing_ok=True)  # the check in a child has tests of its own
    tier = tier_in(folder)
    await tier.open()
    slots = sum(-(-record.header.length_bytes // 4096) * 4096 for record in tier.copies.records())
    uncounted = int(tier.used_bytes != slots)
    wrong, lost = await look(tier, may_hold, is_up=True)
    problems = len(tier.check())
    await tier.close()
    return {"wrong": wrong, "lost": lost, "uncounted": uncounted + problems}


async def sweep(folder: Path, error: int, tear: int) -> dict[str, int]:
    """Fail operation 1, then 2, and so on until one run has fewer operations than that."""
    shim = ctypes.CDLL(None)
    shim.shim_stop.restype = ctypes.c_long
    total = {"tries": 0, "wrong": 0, "lost": 0, "uncounted": 0, "refused": 0, "unhealed": 0}
    for fail_at in range(1, 1000):
        place = folder / str(fail_at)
        may_hold: MayHold = {number: {None} for number in NUMBERS}
        dice = random.Random(fail_at)
        shim.shim_start(str(place).encode(), fail_at, error, tear)
        tier = tier_in(place)
        try:
            await tier.open()
        except TierUnavailable:
            total["refused"] += 1
        else:
            total["wrong"] += await use(tier, may_hold, dice)
            total["unhealed"] += not await heals(tier, may_hold)
            total["uncounted"] += len(tier.check())
            await tier.close()
        num_operations = shim.shim_stop()
        for name, value in (await verify(place, may_hold)).items():
            total[name] += value
        shutil.rmtree(place)
        if num_operations < fail_at:
            return total
        total["tries"] += 1
    raise AssertionError("the sweep does not end")


async def crash(folder: Path, seed: int, states: int) -> dict[str, int]:
    """Log a run, then lose power at ``states`` points of it, with a random part of what was not synced."""
    shim = ctypes.CDLL(None)
    place, log_path = folder / "run", folder / "log"
    tier = tier_in(place)
    await tier.open()
    await tier.close()
    shutil.copytree(place, folder / "base")
    dice = random.Random(seed)
    may_hold: MayHold = {number: {None} for number in NUMBERS}
    events = place / "events"
    with events.open("w", buffering=1) as said, log_path.open("wb") as log:
        shim.shim_start(str(place).encode(), 0, 0, 0)
        shim.shim_log(log.fileno())
        tier = tier_in(place)
        await tier.open()
        await act(tier, dice, said)
        shim.shim_log(-1)
        shim.shim_stop()
    await tier.close()
    records = read_log(log_path)
    total = {"tries": 0, "wrong": 0, "lost": 0, "uncounted": 0}
    for _ in range(states):
        point = dice.randrange(len(records))
        state = folder / "state"
        may_hold = rebuild(folder / "base", state, records[: point + 1], dice)
        for name, value in (await verify(state, may_hold)).items():
            total[name] += value
        total["tries"] += 1
        shutil.rmtree(state)
    return total


async def act(tier: SsdTier, dice: random.Random, said) -> None:  # type: ignore[no-untyped-def]  # a text file
    """Replace and drop blocks, three at a time, saying before and after what is done."""
    for version in range(1, 16):

        async def one(number: int, version: int = version) -> None:
            said.write(f"start {number} {version}\n")
            (status,) = await tier.write([to_write(number, LENGTH, version=version)], deadline_s=soon())
            if status is WriteStatus.OK:
                said.write(f"ack {number} {version}\n")

        await asyncio.gather(*(one(number) for number in dice.sample(NUMBERS, 3)))
        several = dice.sample(NUMBERS, 4)
        said.writelines(f"start {number} {20 + version}\n" for number in several)
        requests = [to_write(number, LENGTH, version=20 + version) for number in several]
        statuses = await tier.write(requests, deadline_s=soon())
        for number, status in zip(several, statuses, strict=True):
            if status is WriteStatus.OK:
                said.write(f"ack {number} {20 + version}\n")
        if version % 4 == 3:
            gone = dice.choice(NUMBERS)
            said.write(f"start-drop {gone} 0\n")
            await tier.drop([block_id(gone)])
            said.write(f"drop {gone} 0\n")


def read_log(path: Path) -> list[tuple[int, str, int, bytes, int, bool]]:
    """Return (op, file name, offset, data, covered, is durable) of every record."""
    data = path.read_bytes()
    records = []
    position = 0
    while position < len(data):
        op, path_length, offset, length, covered, durable, _ = HEAD.unpack_from(data, position)
        position += HEAD.size
        name = data[position : position + path_length].decode()
        position += path_length
        payload_length = length if op == 1 else 0
        records.append((op, name, offset, data[position : position + payload_length], covered, bool(durable)))
        position += payload_length
    return records


def rebuild(base: Path, state: Path, records, dice: random.Random) -> MayHold:  # type: ignore[no-untyped-def]
    """Make the folder as a power loss after these records may leave it; returns what it may hold."""
    shutil.copytree(base, state)
    durable = [record[0] == 1 and record[5] for record in records]
    for op, name, _, _, covered, _ in records:
        if op == 2:
            for index in range(covered):
                durable[index] |= records[index][1] == name
    may_hold: MayHold = {number: {None} for number in NUMBERS}
    chance = dice.choice([0.0, 0.5, 1.0])
    for index, (op, name, offset, data, _, _) in enumerate(records):
        if op != 1:
            continue
        if name.endswith("/events"):
            note(may_hold, data.decode())
            continue
        target = state / name.split("/run/", 1)[1]
        sectors = [(at, data[at : at + 512]) for at in range(0, len(data), 512)]
        is_whole = durable[index] or dice.random() < 0.3
        kept = sectors if is_whole else [part for part in sectors if dice.random() < chance]
        with target.open("r+b") as file:
            for at, part in kept:
                file.seek(offset + at)
                file.write(part)
    return may_hold


def note(may_hold: MayHold, line: str) -> None:
    word, number, version = line.split()
    if word == "start":
        may_hold[int(number)].add(int(version))
    elif word == "ack":
        may_hold[int(number)] = {int(version)}
    elif word == "start-drop":
        may_hold[int(number)].add(None)
    else:
        may_hold[int(number)] = {None}


def main() -> None:
    what, folder, first, second = sys.argv[1:]
    work = {"sweep": sweep, "crash": crash}[what]
    result = asyncio.run(work(Path(folder), int(first), int(second)))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    assert os.environ.get("LD_PRELOAD"), "start it with disk_shim preloaded"
    main()
