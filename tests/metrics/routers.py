"""What routers do with events, as their sources say, at the versions that docs/events.md names.

Each decoder applies the rules of that router's: which types, lengths and members it refuses. None of their
code is in here. A block is named by the number that the router keeps.
"""

import struct
from dataclasses import dataclass


class Refused(Exception):
    """The router does not take this in."""


class Number(int):
    """An integer with the first byte of its encoding, which tells Go's decoder its type."""

    code = 0


UINT64, INT64 = 0xCF, 0xD3
_WIDTHS = {
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", UINT64: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", INT64: ">q",
}  # fmt: skip


def read(data):
    """Decode one MessagePack value, the whole of ``data``."""
    value, end = _read(data, 0)
    if end != len(data):
        raise Refused("bytes behind the value")
    return value


def _read(data, at):
    code = data[at]
    at += 1
    if code < 0x80 or code >= 0xE0:
        return _number(code, code if code < 0x80 else code - 256), at
    if code in _WIDTHS:
        form = _WIDTHS[code]
        return _number(code, *struct.unpack_from(form, data, at)), at + struct.calcsize(form)
    if code == 0xCB:
        return struct.unpack_from(">d", data, at)[0], at + 8
    if code in {0xC0, 0xC2, 0xC3}:
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    return _read_long(data, at, code)


def _number(code, value):
    made = Number(value)
    made.code = code
    return made


_LENGTHS = {  # first byte: what it is, bytes of its length
    0xC4: (bytes, 1), 0xC5: (bytes, 2), 0xC6: (bytes, 4), 0xD9: (str, 1), 0xDA: (str, 2), 0xDB: (str, 4),
    0xDC: (list, 2), 0xDD: (list, 4), 0xDE: (dict, 2), 0xDF: (dict, 4),
}  # fmt: skip


def _read_long(data, at, code):
    if code in _LENGTHS:
        kind, width = _LENGTHS[code]
        length, at = int.from_bytes(data[at : at + width], "big"), at + width
    elif code < 0x90:
        kind, length = dict, code & 0x0F
    elif code < 0xA0:
        kind, length = list, code & 0x0F
    else:
        kind, length = str, code & 0x1F
    if kind in (bytes, str):
        raw = data[at : at + length]
        return (raw if kind is bytes else raw.decode()), at + length
    items = []
    for _ in range(length * (2 if kind is dict else 1)):
        item, at = _read(data, at)
        items.append(item)
    return (items if kind is list else dict(zip(items[::2], items[1::2], strict=True))), at


@dataclass(frozen=True)
class Taken:
    """One event as a router keeps it: stored, removed or cleared. ``num_tokens`` came with it."""

    kind: str
    blocks: tuple[int, ...] = ()
    parent: int | None = None
    block_size: int = 0
    medium: str = ""
    num_tokens: int = 0


_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def _need(condition, what):
    if not condition:
        raise Refused(what)


def _batch(payload, *, lengths=(3,)):
    batch = read(payload)
    _need(isinstance(batch, list) and len(batch) in lengths, "the batch is no array of that length")
    _need(isinstance(batch[0], float) and isinstance(batch[1], list), "time or events")
    return batch


def _at(fields, index):
    return fields[index] if index < len(fields) else None


class LlmD:
    """llm-d's adapter for vLLM. Topics are ``kv@POD@MODEL``; ``takes_maps`` from llm-d-router on."""

    def __init__(self, *, takes_maps):
        self._takes_maps = takes_maps

    @staticmethod
    def source(topic):
        """Return pod and model; a topic of another form is the pod's name as a whole."""
        parts = topic.decode().split("@")
        return (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")

    def decode(self, payload):
        return [self._event(event) for event in _batch(payload, lengths=(2, 3))[1]]

    def _event(self, event):
        if isinstance(event, dict):
            _need(self._takes_maps, "an event that is a map")
            members = _STORED if event["type"] == "BlockStored" else ("block_hashes", "medium")
            event = [event["type"], *(event.get(name) for name in members)]
        _need(event and isinstance(event[0], str), "no tag")
        if event[0] == "AllBlocksCleared":
            return Taken("cleared")
        _need(isinstance(_at(event, 1), list), "block_hashes")
        blocks = tuple(map(self._hash, event[1]))
        if event[0] == "BlockRemoved":
            return Taken("removed", blocks, medium=(_at(event, 2) or "gpu").lower())
        _need(event[0] == "BlockStored" and len(event) >= 5, "tag, or fewer than five fields")
        _need(isinstance(event[3], list) and isinstance(event[4], int), "token_ids or block_size")
        _need(_at(event, 6) is None or isinstance(event[6], str), "medium")
        parent = None if event[2] is None else self._hash(event[2])
        return Taken("stored", blocks, parent, event[4], (_at(event, 6) or "gpu").lower(), len(event[3]))

    @staticmethod
    def _hash(told):
        if isinstance(told, bytes):
            _need(told, "an empty hash")
            return int.from_bytes(told[-8:], "big")
        _need(isinstance(told, Number) and told.code in {UINT64, INT64}, "a hash that is no 64-bit integer")
        return int(told) % (1 << 64)


class Dynamo:
    """Dynamo's listener: either form, hashes as integers; blocks are published with their tokens only."""

    tiers = {  # noqa: RUF012
        "GPU": "device", "DEVICE": "device", "CPU_PINNED": "host", "CPU_TIER1": "host", "CPU_TIER2": "disk",
        "DISK": "disk", "NVME": "disk", "EXTERNAL": "external", "NETWORK": "external", "REMOTE": "external",
        "SHARED": "external",
    }  # fmt: skip
    later_tiers = {"CPU": "host", "STORAGE": "disk"}  # noqa: RUF012

    def __init__(self, *, is_late):
        self._tiers = self.tiers | (self.later_tiers if is_late else {})

    def decode(self, payload):
        return [self._event(event) for event in _batch(payload)[1]]

    def _event(self, event):
        if isinstance(event, list):
            names = _STORED if event[0] == "BlockStored" else ("block_hashes", "medium")
            event = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
        if event["type"] == "AllBlocksCleared":
            return Taken("cleared")
        blocks = tuple(map(self._hash, event["block_hashes"]))
        # A word that it does not know counts as the GPU's.
        medium = self._tiers.get(event.get("medium") or "", "device")
        if event["type"] == "BlockRemoved":
            return Taken("removed", blocks, medium=medium)
        _need(event["type"] == "BlockStored", "tag")
        told = event.get("parent_block_hash")
        parent = None if told is None else self._hash(told)
        _need(len({parent, *blocks}) == len(blocks) + 1, "a block that is its own ancestor")
        return Taken("stored", blocks, parent, event["block_size"], medium, len(event["token_ids"]))

    @staticmethod
    def _hash(told):
        _need(isinstance(told, Number), "a hash that is no integer")
        return int(told) % (1 << 64)


class AIBrix:
    """AIBrix's; ``takes_maps`` in later versions. It keeps signed integers, of bytes the first eight."""

    def __init__(self, *, takes_maps=False):
        self._takes_maps = takes_maps

    def decode(self, payload):
        return [self._event(event) for event in _batch(payload, lengths=(2, 3))[1]]

    def _event(self, event):
        if isinstance(event, dict) and self._takes_maps:
            members = _STORED if event["type"] == "BlockStored" else ("block_hashes",)
            event = [event["type"], *(event.get(name) for name in members)]
        _need(isinstance(event, list) and event, "an event that is no array")
        if event[0] == "AllBlocksCleared":
            return Taken("cleared")
        _need(len(event) >= 2 and isinstance(event[1], list), "block_hashes")
        blocks = tuple(map(self._hash, event[1]))
        if event[0] == "BlockRemoved":
            return Taken("removed", blocks)  # from wherever: it keeps no medium
        _need(event[0] == "BlockStored" and len(event) >= 5, "tag, or fewer than five fields")
        tokens, size = event[3], event[4]
        _need(isinstance(tokens, list) and (not tokens or len(tokens) % size == 0), "token_ids")
        _need(_at(event, 5) is None or isinstance(event[5], int), "lora_id")
        parent = None if event[2] is None else self._hash(event[2])
        return Taken("stored", blocks, parent, size, _at(event, 6) or "", len(tokens))

    @staticmethod
    def _hash(told):
        if isinstance(told, bytes):
            return int.from_bytes(told[:8], "big", signed=True)
        _need(isinstance(told, Number), "a hash that is neither")
        return (int(told) + (1 << 63)) % (1 << 64) - (1 << 63)


class Conductor:
    """Mooncake Conductor's, for a publisher that is registered as ``vLLM`` or as ``SGLang``."""

    def __init__(self, kind, *, block_size, rank=0):
        self._kind = kind
        self._block_size = block_size
        self._rank = rank

    def decode(self, payload):
        """Return the events that it takes; of the others nothing is kept."""
        batch = _batch(payload)
        _need(batch[2] is None or batch[2] == self._rank, "another data-parallel rank")
        taken = []
        for event in batch[1]:
            _need(isinstance(event, dict), "an event that is no map")
            one = self._vllm(event) if self._kind == "vLLM" else self._sglang(event)
            taken += [] if one is None else [one]
        return taken

    def _vllm(self, event):
        if event["type"] == "AllBlocksCleared":
            return Taken("cleared")
        for told in event["block_hashes"]:
            is_unsigned = isinstance(told, int) and told >= 0
            _need(is_unsigned or (isinstance(told, bytes) and len(told) >= 8), "a hash")
        if event["type"] == "BlockStored":
            _need(set(_STORED) <= set(event), "a member that is not there")
            _need(event["block_size"] == self._block_size, "another block_size")
        _need((event["medium"] or "").lower() != "gpu", "not of a store")
        return None  # other media than the GPU are passed over

    def _sglang(self, event):
        if event["type"] == "AllBlocksCleared":
            _need(set(event) == {"type"}, "a member too many")
            return Taken("cleared")
        blocks = tuple(map(self._signed, event["block_hashes"]))
        medium = (event.get("medium") or "gpu").lower()
        _need(medium in {"gpu", "cpu", "cpu_pinned", "disk"}, "a medium that it does not know")
        if event["type"] == "BlockRemoved":
            _need(
                not {"parent_block_hash", "token_ids", "block_size", "lora_id"} & set(event),
                "member too many",
            )
            return Taken("removed", blocks, medium=medium)
        _need(event["type"] == "BlockStored" and set(_STORED[:5]) <= set(event), "tag or members")
        _need(blocks and 0 < event["block_size"] <= self._block_size, "blocks or block_size")
        _need(event["lora_id"] is None, "lora_id")
        told = event["parent_block_hash"]
        parent = None if told is None else self._signed(told)
        return Taken("stored", blocks, parent, event["block_size"], medium, len(event["token_ids"]))

    @staticmethod
    def _signed(told):
        _need(isinstance(told, Number) and -(1 << 63) <= told < 1 << 63, "a hash that is no signed integer")
        return int(told)
