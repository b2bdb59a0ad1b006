"""GET /v1/events: which blocks came and went, as server-sent events, of the caller's namespaces alone."""

import asyncio
import json
from collections import deque

from aiohttp import web

from kvstore.event_feed import EventBatch
from kvstore.http.service import COMMON_HEADERS, Call, name_answer
from kvstore.keys import NamespaceDigest
from kvstore.kv_events import HashForm, KvEvent

EVENTS_TYPE = "text/event-stream; charset=utf-8"

_QUEUE_EVENTS = 4096
"""Events that wait for one client; what comes beyond that is lost to it, and it is told so."""

_QUEUE_BLOCKS = 65_536
"""Blocks in them: told at once they take the loop for some 20 ms."""

_HEARTBEAT_S = 5.0
_LOOK_S = 0.25
_ADMISSION_S = 1.0
"""How often it is asked whether the client's key is still known: keyrings are looked at as often."""


class Mailbox:
    """Events on their way to one client; bounded."""

    def __init__(self, call: Call, only: NamespaceDigest | None) -> None:
        self._call = call
        self._only = only
        self._waiting: deque[tuple[EventBatch, int]] = deque()
        self._num_blocks = 0
        self._num_lost = 0
        self.has_mail = asyncio.Event()

    def take_in(self, batch: EventBatch) -> None:
        """Keep what the caller may know of, as far as there is room."""
        for namespace, num_lost in batch.lost.items():
            self._num_lost += num_lost if self._is_theirs(namespace) else 0
        for index, event in enumerate(batch.events):
            if not self._is_theirs(event.namespace):
                continue
            num_blocks = self._num_blocks + len(event.keys)
            if len(self._waiting) < _QUEUE_EVENTS and num_blocks <= _QUEUE_BLOCKS:
                self._waiting.append((batch, index))
                self._num_blocks = num_blocks
            else:
                self._num_lost += len(event.keys)
        if self._waiting or self._num_lost:
            self.has_mail.set()

    def _is_theirs(self, namespace: NamespaceDigest) -> bool:
        if self._only is not None:
            return namespace == self._only
        service = self._call.service
        return service.tenancy.admits(self._call.identity, service.manager.namespace(namespace))

    def empty(self) -> bytes:
        """Return what waits as server-sent events."""
        self.has_mail.clear()
        lines: list[str] = []
        if self._num_lost:
            lines.append(f"event: lost\ndata: {json.dumps({'blocks': self._num_lost})}\n\n")
            self._num_lost = 0
        self._num_blocks = 0
        while self._waiting:
            batch, index = self._waiting.popleft()
            if index not in batch.texts:
                batch.texts[index] = _text(batch.events[index])
            lines.append(batch.texts[index])
        return "".join(lines).encode()


def _text(event: KvEvent) -> str:
    told = {"namespace": event.namespace.hex(), **event.as_map(HashForm.HEX)}
    return f"data: {json.dumps(told)}\n\n"


async def events(call: Call) -> web.StreamResponse:
    """Tell of blocks that come and go, as server-sent events."""
    service = call.service
    only = None if call.values.text("namespace") is None else call.namespace().digest
    response = web.StreamResponse(headers={**COMMON_HEADERS, "Content-Type": EVENTS_TYPE})
    response.force_close()
    name_answer(call.request, response)
    mailbox = Mailbox(call, only)
    until_s = None if call.timeout_s is None else service.clock() + call.timeout_s
    beat_s, ask_s = service.clock() + _HEARTBEAT_S, service.clock() + _ADMISSION_S
    if call.request.method == "HEAD":
        return response
    with service.feed.listening(mailbox.take_in):
        await response.prepare(call.request)
        await response.write(b": events of blocks, as they happen\n\n")
        while not service.is_draining and (until_s is None or service.clock() < until_s):
            left_s = _LOOK_S if until_s is None else max(0.0, min(_LOOK_S, until_s - service.clock()))
            try:
                async with asyncio.timeout(left_s):
                    await mailbox.has_mail.wait()
                is_quiet = False
            except TimeoutError:
                is_quiet = service.clock() < beat_s
            if service.clock() >= ask_s:
                if not call.is_admitted():
                    break
                ask_s = service.clock() + _ADMISSION_S
            if is_quiet:
                continue
            await service.feed.take_turn()
            # To a client that takes nothing this is never over, and its connection is ended for that.
            await response.write(mailbox.empty() or b": still here\n\n")
            beat_s = service.clock() + _HEARTBEAT_S
    await response.write_eof()
    return response
