"""LinkPool: the connections of a blocking client in one process."""

import os
import threading
import time
import weakref

from kvstore.arena_link import ArenaCache
from kvstore.calls import Connection
from kvstore.client_state import ClientState
from kvstore.errors import InvalidRequest, ServerUnavailable, TimedOut
from kvstore.link import Dial, Link
from kvstore.shared_link import SharedLink

MAX_LINKS = 16
"""Connections one client holds at most for calls of one thread each; further threads wait their turn, within
their call's time. One more is shared by everything that is held: leases and reserved slots."""

_LOOK_S = 1.0
"""How often connections that nobody uses give back slots that lie unused in them."""


_RECOUNT_S = 0.05
"""How often whoever waits for a connection looks whether one was lost without a word."""


class _Place:
    """One of the places for connections. Whoever makes a connection holds it, and then the connection does.

    It is taken as long as somebody holds it: a call that ends between two steps, by an exception that a
    signal or another thread brings, gives nothing back and says nothing.
    """


class LinkPool:
    """Connections of one process: some used by one call at a time, and one that is shared. Thread-safe."""

    def __init__(self, dial: Dial, state: ClientState, *, is_read_only: bool) -> None:
        self.pid = os.getpid()
        self.arenas = ArenaCache()
        self._dial = dial
        self._state = state
        self._is_read_only = is_read_only
        self._idle: list[Link] = []
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._num_waiting = 0
        self._shared: SharedLink | None = None
        self._sharing = threading.Lock()
        self._is_closed = False
        self._look_at_s = 0.0
        self._changed = threading.Condition()

    def shared(self, deadline_s: float, holder: Connection | None) -> SharedLink:
        """Return the connection that everything held belongs to, made if there is none.

        With ``holder`` only that very one will do.

        Raises:
            ServerUnavailable: no server answers (TimedOut: in time), or the holder is gone.
        """
        shared = self._shared
        if holder is not None:
            if shared is None or shared is not holder or shared.is_lost:
                raise ServerUnavailable("server: the connection that held it has ended, and it with that")
            return shared
        if not self._sharing.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise TimedOut("client: no connection in time")
        try:
            if self._is_closed:
                raise InvalidRequest("client: it is closed")
            shared = self._shared
            if shared is None or shared.is_lost:
                self._state.check_may_connect()
                if shared is not None:
                    shared.close()
                self._shared = shared = self._connect_shared(deadline_s)
                self._close_if_closed(shared)
            return shared
        finally:
            self._sharing.release()

    def _close_if_closed(self, shared: SharedLink) -> None:
        """Close a connection that ``close`` looked too early to find."""
        if self._is_closed:
            shared.close()

    def close(self) -> None:
        """Close every connection; one in use by one call is closed when its call ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._close_idle_if_closed()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
        self.arenas.forget()

    def forget(self) -> None:
        """Let go of what was inherited from a parent process; its connections go on there."""
        for link in self._idle:
            link.close()
        if self._shared is not None:
            self._shared.close()

    def take(self, deadline_s: float, *, is_control: bool) -> Link:
        """Return a connection for one call, to be given back.

        Raises:
            InvalidRequest: the client is closed.
            ServerUnavailable: no server answers (TimedOut: in time, or none becomes free in time).
        """
        if time.monotonic() >= self._look_at_s:
            self._give_back_idle()
        while True:
            link = self._pop_idle() or self._wait_for_link(deadline_s, is_control=is_control)
            if isinstance(link, _Place):
                return self._connect(link, deadline_s)
            if link.is_usable and not self._is_closed:
                return link
            self._close(link)

    def give_back(self, link: Link) -> None:
        """Take a connection back after its call; one in doubt is closed."""
        if not link.is_clean or self._is_closed:
            self._close(link)
            return
        self._idle.append(link)
        # Whoever waits has said so before it looked for an idle one, so it has seen this one or is told.
        if self._num_waiting or self._is_closed:
            with self._changed:
                self._changed.notify()
            self._close_idle_if_closed()

    def _wait_for_link(self, deadline_s: float, *, is_control: bool) -> Link | _Place:
        """Return an idle connection, or the place of one more that may be made."""
        with self._changed:
            self._num_waiting += 1
            try:
                while True:
                    if self._is_closed:
                        raise InvalidRequest("client: it is closed")
                    link = self._pop_idle()
                    if link is not None:
                        return link
                    if len(self._places) < MAX_LINKS:
                        if not is_control:
                            self._state.check_may_connect()
                        place = _Place()
                        self._places.add(place)
                        return place
                    remaining_s = deadline_s - time.monotonic()
                    if remaining_s <= 0:
                        raise TimedOut(f"client: all {MAX_LINKS} connections are in use")
                    self._changed.wait(min(remaining_s, _RECOUNT_S))
            finally:
                self._num_waiting -= 1

    def _connect(self, place: _Place, deadline_s: float) -> Link:
        link: Link | None = None
        try:
            link = Link.open(self._dial, self.arenas, deadline_s, is_read_only=self._is_read_only)
        finally:
            if link is None:
                self._state.note_not_connected()
                self._free(place)
        assert link is not None
        link.place = place
        if self._is_closed:
            self._close(link)
            self.arenas.forget()
            raise ServerUnavailable("client: it was closed meanwhile")
        self._state.note_connected(link.welcome.instance)
        return link

    def _connect_shared(self, deadline_s: float) -> SharedLink:
        link: SharedLink | None = None
        try:
            link = SharedLink.open(self._dial, self.arenas, deadline_s, is_read_only=self._is_read_only)
        finally:
            if link is None:
                self._state.note_not_connected()
        assert link is not None
        if self._is_closed:
            link.close()
            self.arenas.forget()
            raise ServerUnavailable("client: it was closed meanwhile")
        self._state.note_connected(link.welcome.instance)
        return link

    def _close_idle_if_closed(self) -> None:
        while self._is_closed and (link := self._pop_idle()) is not None:
            self._close(link)

    def _give_back_idle(self) -> None:
        """Have connections that wait to be used give back what was lent to them ahead."""
        self._look_at_s = time.monotonic() + _LOOK_S
        for _ in range(len(self._idle)):
            try:
                link = self._idle.pop(0)
            except IndexError:
                return
            link.give_back_idle()
            self.give_back(link)

    def _pop_idle(self) -> Link | None:
        try:
            return self._idle.pop()  # one step of the interpreter: no lock is needed for it
        except IndexError:
            return None

    def _close(self, link: Link) -> None:
        link.close()
        self._free(link.place)

    def _free(self, place: object) -> None:
        with self._changed:
            if isinstance(place, _Place):
                self._places.discard(place)
            self._changed.notify()

    @property
    def num_links(self) -> int:
        """Connections for calls of one thread each, idle ones and those that are being made included."""
        return len(self._places)
