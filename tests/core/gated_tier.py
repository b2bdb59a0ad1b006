"""A tier in a dictionary whose reads and writes can be made to wait or fail, for tests of the manager."""

import asyncio

import numpy as np

from kvstore.checksum import checksum
from kvstore.miss import MissReason
from kvstore.tier import Medium, Probe, ReadOutcome, ReadStatus, TierHealth, WriteStatus


class GatedTier:
    def __init__(self, name, *, is_shared=False, capacity_blocks=None):
        self.name = name
        self.medium = Medium.REMOTE if is_shared else Medium.SSD
        self.is_shared = is_shared
        self.capacity_blocks = capacity_blocks
        self.capacity_bytes = 0
        self.stored = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.read_status = None
        self.write_status = WriteStatus.OK
        self.is_up = True
        self.read_batches = []
        self.closed = False
        self.namespaces = []
        self.touched = []

    @property
    def used_bytes(self):
        return sum(len(payload) for _, payload in self.stored.values())

    def health(self):
        return TierHealth(self.is_up, "" if self.is_up else "switched off")

    async def open(self):
        pass

    async def close(self):
        self.closed = True

    def open_namespace(self, namespace):
        self.namespaces.append(namespace)

    async def scan(self):
        return [] if self.is_shared else [header for header, _ in self.stored.values()]

    async def probe(self, blocks, *, deadline_s):
        await self.gate.wait()
        tiers = [self.name if self.is_up and block in self.stored else None for block in blocks]
        return Probe(tiers, None if self.is_up else MissReason.UNAVAILABLE)

    async def read(self, requests, *, deadline_s):
        self.read_batches.append([request.block for request in requests])
        await self.gate.wait()
        return [self._read(request) for request in requests]

    def _read(self, request):
        if self.read_status is not None:
            request.buffer[:8] = b"garbage!"
            return ReadOutcome(self.read_status)
        if request.block not in self.stored:
            return ReadOutcome(ReadStatus.ABSENT)
        header, payload = self.stored[request.block]
        np.asarray(request.buffer)[: len(payload)] = payload
        if checksum(payload) != header.checksum:
            return ReadOutcome(ReadStatus.CORRUPT)
        return ReadOutcome(ReadStatus.OK, header, self.name)

    async def write(self, requests, *, deadline_s):
        await self.gate.wait()
        return [self._write(request) for request in requests]

    def _write(self, request):
        if not self.is_up:
            return WriteStatus.UNAVAILABLE
        if self.write_status is WriteStatus.OK:
            payload = np.array(request.buffer[: request.header.length_bytes], copy=True)
            self.stored[request.header.block] = (request.header, payload)
        return self.write_status

    async def drop(self, blocks):
        return sum(self.stored.pop(block, None) is not None for block in blocks)

    async def touch(self, blocks):
        self.touched += blocks

    def has_room(self, length_bytes, count=1):
        return self.capacity_blocks is None or len(self.stored) + count <= self.capacity_blocks
