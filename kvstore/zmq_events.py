"""ZmqPublisher: publishes a feed's events over ZeroMQ, as vLLM's engines publish theirs.

PUB socket: ``[topic, sequence, batch]``, the sequence a big-endian u64 that grows by one with each batch, the
batch MessagePack of ``[time, events, rank]``. The first batch of a run is AllBlocksCleared. ROUTER socket:
who sends ``[b"", sequence]`` gets ``[b"", topic, sequence, batch]`` for each batch from there on that is
still kept, and then ``[b"", b"", 2**64 - 1, b""]``. Changes that were lost leave out a number, which a replay
fills with AllBlocksCleared: who counts learns that it knows too much.

Never in the way: a subscriber that does not keep up loses batches at its own queue of ``_QUEUE_BATCHES``,
ZeroMQ sends on threads of its own, and what is kept for replays is bounded in batches and bytes.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from kvstore.errors import InvalidConfig
from kvstore.event_feed import EventBatch, EventFeed
from kvstore.event_packing import EventPacker
from kvstore.server_counters import EventCounters
from kvstore.zmq_settings import ZmqSettings

logger = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
SERVER_KEY_FILE = "server.key_secret"
CLIENTS_FOLDER = "clients"

_QUEUE_BATCHES = 1000
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_LOOK_S = 1.0
_REPLAY_STEP = 64
_RANK = 0
_OF_OTHERS = 0o037
"""Rights that others may not have to a secret. Its group may read it, as Secrets of Kubernetes have it."""

_MAX_REQUEST_BYTES = 1024
"""What clients send is a subscription, or the number that a replay begins at."""


class ZmqPublisher:
    """Publishes what a feed tells, on one event loop's thread."""

    def __init__(
        self,
        settings: ZmqSettings,
        counters: EventCounters,
        *,
        wall_s: Callable[[], float] = time.time,
        kept_batches: int = _KEPT_BATCHES,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._wall_s = wall_s
        self._kept_batches = kept_batches
        self._packer = EventPacker(settings.hashes, settings.form, settings.media)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publishing: zmq.Socket[bytes] | None = None
        self._replaying: zmq.Socket[bytes] | None = None
        self._authenticator: ThreadAuthenticator | None = None

    def open(self) -> None:
        """Take the endpoints.

        Raises:
            InvalidConfig: an endpoint or the keys cannot be used.
        """
        self._settings.check()
        self._context = zmq.Context()
        try:
            if self._settings.keys is not None:
                self._let_in_only(self._settings.keys)
            self._publishing = self._bound(zmq.PUB, self._settings.endpoint, _QUEUE_BATCHES)
            if self._settings.replay:
                # A replay is queued whole: what is kept is what may be queued.
                self._replaying = self._bound(zmq.ROUTER, self._settings.replay, self._kept_batches + 1)
        except BaseException:
            self.close()
            raise

    def _let_in_only(self, folder: Path) -> None:
        if not zmq.has("curve"):
            raise InvalidConfig("events: this ZeroMQ was built without CURVE, so nobody can be authenticated")
        if not (folder / CLIENTS_FOLDER).is_dir():
            raise InvalidConfig(f"events: {folder}: has no folder {CLIENTS_FOLDER}, of clients' public keys")
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(folder / CLIENTS_FOLDER))

    def _bound(self, kind: int, endpoint: str, queue_batches: int) -> "zmq.Socket[bytes]":
        assert self._context is not None, "not open"
        keys = None if self._settings.keys is None else _certificate(self._settings.keys / SERVER_KEY_FILE)
        sock = self._context.socket(kind)
        try:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDHWM, queue_batches)
            sock.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            sock.setsockopt(zmq.IPV6, 1)
            if keys is not None:
                sock.curve_publickey, sock.curve_secretkey = keys
                sock.curve_server = True
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            sock.close()
            raise InvalidConfig(f"events: {endpoint}: cannot be listened on: {error.strerror}") from error
        return sock

    def close(self) -> None:
        """Give the endpoints up; what was not sent is not sent. Idempotent."""
        for sock in (self._publishing, self._replaying):
            if sock is not None:
                sock.close()
        self._publishing = self._replaying = None
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._context is not None:
            self._context.term()
            self._context = None

    @contextlib.asynccontextmanager
    async def publishing(self, feed: EventFeed) -> AsyncIterator[None]:
        """Publish all that a feed tells from now on, and answer those who want it again."""
        self._publish([self._packer.cleared()])
        answering = asyncio.create_task(self._answer_forever(), name="event-replays")
        try:
            with feed.listening(self._take):
                yield
        finally:
            answering.cancel()
            await asyncio.wait([answering])

    def _take(self, batch: EventBatch) -> None:
        if batch.lost:
            # Not sent: whoever counts sees that a number is missing, and asks for it.
            self._keep([self._packer.cleared()])
        events = self._packer.events(batch.events)
        if events:
            self._publish(events)

    def _publish(self, events: Sequence[bytes]) -> None:
        assert self._publishing is not None, "not open"
        number, payload = self._keep(events)
        with contextlib.suppress(zmq.Again):  # a PUB socket has none: it drops for the slow one alone
            self._publishing.send_multipart(
                [self._settings.topic.encode(), number.to_bytes(8, "big"), payload], zmq.NOBLOCK
            )

    def _keep(self, events: Sequence[bytes]) -> tuple[int, bytes]:
        """Give a batch the next number, and keep it if there are replays; returns number and payload."""
        payload = self._packer.batch(self._wall_s(), events, _RANK)
        number, self._next = self._next, self._next + 1
        if self._replaying is None:
            return number, payload
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._kept_batches or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        return number, payload

    async def _answer_forever(self) -> None:
        if self._replaying is None:
            return
        loop, is_asked = asyncio.get_running_loop(), asyncio.Event()
        descriptor = self._replaying.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        loop.add_reader(descriptor, is_asked.set)
        try:
            while True:
                # ZeroMQ tells of a message once; should that get lost, it is looked for now and then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):  # wait_for may swallow a cancellation
                        await is_asked.wait()
                is_asked.clear()
                try:
                    await self._answer(self._replaying)
                except zmq.ZMQError:
                    logger.exception("events: answering a replay failed")
        finally:
            loop.remove_reader(descriptor)

    async def _answer(self, sock: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                request = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) != 3 or request[1] or len(request[2]) != 8:
                logger.debug("events: a replay was asked for in a form that is none")
                continue
            self._counters.replays += 1
            await self._replay(sock, request[0], int.from_bytes(request[2], "big"))

    async def _replay(self, sock: "zmq.Socket[bytes]", client: bytes, start: int) -> None:
        topic = self._settings.topic.encode()
        wanted = [kept for kept in self._kept if kept[0] >= start]
        for index, (number, payload) in enumerate(wanted):
            sock.send_multipart([client, b"", topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            if index % _REPLAY_STEP == _REPLAY_STEP - 1:
                await asyncio.sleep(0)
        sock.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)


def _certificate(path: Path) -> tuple[bytes, bytes]:
    """Return public and secret key of a certificate file."""
    try:
        if path.stat().st_mode & _OF_OTHERS:
            raise InvalidConfig(f"events: {path}: others may read it: chmod 600 {path}")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"events: {path}: is no certificate of zmq.auth: {error}") from error
    if secret is None:
        raise InvalidConfig(f"events: {path}: has no secret key: take the file that ends in .key_secret")
    return public, secret
