"""RankGroup: rank 0's side of a group of ranks: it starts the followers, asks them, and notices their end.

Two socket pairs join rank 0 and a follower. On one, requests and answers travel, between their event loops:
small ones, in any order. On the other, passes, from the thread that computes here to the one that computes
there: each pass is announced before rank 0 computes its own share of it. Beside them torch.distributed adds
up what the ranks computed.

A group lives and dies as one. When a follower's end of a socket closes, or it does not answer for
``patience_s``, or a pass fails on any rank, the group is lost: every follower is killed, every call that
waits raises RankLost, and so does every later one. The ranks' pages are no longer known to agree then.
"""

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.generation import EngineClosed
from kvstore_engine_adapter.shard import Shard
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.wire import (
    LENGTH,
    Message,
    Pass,
    frame,
    frame_length,
    message_of,
    unframe,
)

logger = logging.getLogger(__name__)

_M = TypeVar("_M", bound=Message)

DEFAULT_PATIENCE_S = 60.0
"""How long a follower may be silent: as long as no pass takes, even on a machine that swaps."""

_PING_S = 5.0
_END_S = 1.0
_GLANCE_S = 0.01
_CLOSE_S = 0.5
_MODULE = "kvstore_engine_adapter.tensor_parallel.follower"


class RankLost(EngineClosed):
    """A rank of the engine has ended, does not answer, or could not do its share: the engine cannot go on."""


@dataclass(slots=True, eq=False)
class _Link:
    """One follower."""

    rank: int
    process: "subprocess.Popen[bytes]"
    passes: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    waiting: dict[int, "asyncio.Future[Message]"] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None


class RankGroup:
    """The ranks of one engine, seen from rank 0. One event loop's thread, but for ``announce``.

    ``store`` is the address of the store that each rank keeps its parts of blocks in; None: there is none.
    """

    def __init__(
        self, size: int, *, store: str | None = None, patience_s: float = DEFAULT_PATIENCE_S
    ) -> None:
        self.size = size
        self.store = store
        self.patience_s = patience_s
        self._links: list[_Link] = []
        self._numbers = itertools.count(1)
        self._num_passes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lost: RankLost | None = None
        self._is_closing = False
        self._has_ended = asyncio.Event()
        self._pinging: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def shard(self) -> Shard:
        """Rank 0's."""
        return Shard(0, self.size)

    @property
    def process_ids(self) -> list[int]:
        """The followers' processes, in the order of ranks."""
        return [link.process.pid for link in self._links]

    @property
    def lost(self) -> RankLost | None:
        """Why the group is lost, if it is."""
        return None if self._lost is None else RankLost(*self._lost.args)

    @property
    def rendezvous(self) -> Path:
        """A file where the ranks find each other, in a folder that only this user may enter."""
        assert self._folder is not None, "the group is not started"
        return Path(self._folder.name) / "ranks"

    async def start(self) -> None:
        """Start the followers.

        Raises:
            InvalidConfig: a process cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-ranks-")
        for rank in range(1, self.size):
            self._links.append(await _start(rank, self.patience_s))
        for link in self._links:
            link.task = asyncio.create_task(self._listen(link), name=f"rank-{link.rank}")

    async def wait_lost(self) -> RankLost:
        """Wait until the group is lost; returns why."""
        await self._has_ended.wait()
        assert self._lost is not None
        return RankLost(*self._lost.args)

    async def load(self, about: messages.Load) -> list[str]:
        """Have every follower load its share of a model; returns the digests of what they loaded.

        Raises:
            RankLost: one has ended, or could not.
        """
        loads = [replace(about, rank=link.rank) for link in self._links]
        answers = await self._ask_each(loads, messages.Loaded)
        # Before that a follower may be busy for minutes, with imports from a slow disk.
        self._pinging = asyncio.create_task(self._ping_forever(), name="rank-pings")
        return [answer.digest for answer in answers]

    async def ask(self, message: Message, kind: type[_M]) -> list[_M]:
        """Send a request to every follower; returns their answers, in the order of ranks.

        Raises:
            RankLost: the group is lost, or a follower could not do it.
        """
        return await self._ask_each([message] * len(self._links), kind)

    def tell(self, message: Message) -> None:
        """Send what wants no answer; it arrives before everything that is sent later."""
        if self._lost is None:
            for link in self._links:
                link.writer.write(frame([0, *message.values()]))

    def announce(self, work: Pass) -> None:
        """Tell the followers what the next pass computes. Blocking; called in the thread that computes.

        Raises:
            RankLost: the group is lost, or is so now.
        """
        self._refuse_if_lost()
        data = work.pack()
        for link in self._links:
            try:
                link.passes.sendall(data)
            except OSError as error:
                raise self.break_up(f"rank {link.rank} takes no pass: {error}") from error

    def next_pass(self) -> int:
        """Return the number of the next pass."""
        self._num_passes += 1
        return self._num_passes - 1

    def break_up(self, why: str) -> RankLost:
        """Declare the group lost, from any thread; returns the error to raise."""
        if self._lost is None:
            self._lost = RankLost(f"engine: {why}: an engine of {self.size} ranks cannot go on without it")
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)
        return RankLost(*self._lost.args)

    def note_failed_pass(self, error: Exception) -> RankLost:
        """Declare the group lost because a pass failed; returns the error to raise.

        Called in the thread that computes. The usual reason is that a rank has ended, which is known a moment
        later, and says more.
        """
        deadline_s = time.monotonic() + 2 * _END_S
        while self._lost is None and time.monotonic() < deadline_s:
            time.sleep(_GLANCE_S)
        return self.break_up(f"a pass failed: {error}")

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise RankLost(*self._lost.args)

    async def close(self) -> None:
        """Let the followers end, and see to it that they do. Idempotent."""
        self._is_closing = True
        if self._pinging is not None:
            self._pinging.cancel()
        if self._lost is None and self._links:
            with contextlib.suppress(TimeoutError, RankLost):
                async with asyncio.timeout(_CLOSE_S):
                    await self.ask(messages.Close(), messages.Done)
        for link in self._links:
            link.process.kill()
            link.passes.close()
            link.writer.close()
            if link.task is not None:
                link.task.cancel()
                await asyncio.wait([link.task])
            await asyncio.to_thread(link.process.wait)
        self._links = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def _ask_each(self, requests: Sequence[Message], kind: type[_M]) -> list[_M]:
        self._refuse_if_lost()
        answers = await asyncio.gather(
            *(_ask(link, next(self._numbers), item) for link, item in zip(self._links, requests, strict=True))
        )
        found: list[_M] = []
        for link, answer in zip(self._links, answers, strict=True):
            if isinstance(answer, messages.Failed):
                raise self.break_up(f"rank {link.rank} failed: {answer.why}")
            if not isinstance(answer, kind):
                raise self.break_up(f"rank {link.rank} answered {type(answer).__name__}")
            found.append(answer)
        return found

    async def _listen(self, link: _Link) -> None:
        """Take a follower's answers until its end."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await link.reader.readexactly(LENGTH.size)
                    number, *values = unframe(await link.reader.readexactly(frame_length(head)))
                    waiting = link.waiting.pop(int(number), None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message_of(values))
        except Exception as error:
            logger.exception("engine: rank %d sends what cannot be read", link.rank)
            self.break_up(f"rank {link.rank} sends what cannot be read: {error}")
        if not self._is_closing:
            self.break_up(await _how_it_ended(link))

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            try:
                async with asyncio.timeout(self.patience_s):
                    await self.ask(messages.Ping(), messages.Done)
            except RankLost:
                return
            except TimeoutError:
                self.break_up(f"a follower has not answered for {self.patience_s:g} s")
                return

    def _end(self) -> None:
        """Kill the followers, and end every call that waits for one."""
        lost = self._lost
        assert lost is not None
        for link in self._links:
            link.process.kill()
            for waiting in link.waiting.values():
                if not waiting.done():
                    waiting.set_exception(RankLost(*lost.args))
            link.waiting.clear()
        self._has_ended.set()


async def _start(rank: int, patience_s: float) -> _Link:
    control, its_control = socket.socketpair()
    passes, its_passes = socket.socketpair()
    with its_control, its_passes:
        try:
            process = await asyncio.to_thread(_spawn, its_control, its_passes)
        except OSError as error:
            control.close()
            passes.close()
            raise InvalidConfig(f"engine: rank {rank} cannot be started: {error}") from error
    passes.settimeout(patience_s)
    reader, writer = await asyncio.open_connection(sock=control)
    return _Link(rank, process, passes, reader, writer)


def _spawn(control: socket.socket, passes: socket.socket) -> "subprocess.Popen[bytes]":
    numbers = [control.fileno(), passes.fileno()]
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, *map(str, numbers)],
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C is for rank 0, which ends the others when all is done
    )


async def _ask(link: _Link, number: int, message: Message) -> Message:
    answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    link.waiting[number] = answered
    try:
        link.writer.write(frame([number, *message.values()]))
        return await answered
    finally:
        link.waiting.pop(number, None)


async def _how_it_ended(link: _Link) -> str:
    """Return one clause on the end of a follower whose connection has closed."""
    what = f"rank {link.rank} (process {link.process.pid})"
    try:
        status = await asyncio.to_thread(link.process.wait, _END_S)
    except subprocess.TimeoutExpired:
        return f"{what} has closed its connection"
    if status < 0:
        return f"{what} was killed by {signal.Signals(-status).name}"
    return f"{what} ended with status {status}"
