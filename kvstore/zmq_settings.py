"""ZmqSettings: where a store publishes its events over ZeroMQ, and who may read them."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidConfig
from kvstore.kv_events import MEDIUM_WORDS, EventForm, HashForm
from kvstore.tier import Medium

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\s]+):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc:///\S+")
_WORD = re.compile(r"[A-Za-z0-9_.-]{0,32}")
_TIERS = {medium.value: word for medium, word in MEDIUM_WORDS.items() if medium is not Medium.STORE}


@dataclass(frozen=True, slots=True)
class ZmqSettings:
    """Where and how events are published.

    ``keys`` is a folder with ``server.key_secret`` and ``clients/*.key``, CURVE certificates as ``zmq.auth``
    makes them; with it only those clients are let in, and everything is encrypted. ``is_open``: whoever
    reaches an endpoint may listen. ``replay`` empty: none. ``media`` has other words for those of
    ``MEDIUM_WORDS``; of a medium with an empty one nothing is told.
    """

    endpoint: str
    replay: str = ""
    topic: str = ""
    hashes: HashForm = HashForm.INT
    form: EventForm = EventForm.MAP
    keys: Path | None = None
    is_open: bool = False
    media: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse endpoints that cannot be served, or that anybody could reach.

        Raises:
            InvalidConfig: message with the endpoint, the reason and the remedy.
        """
        if self.keys is not None and self.is_open:
            raise InvalidConfig("events: --events-keys and --events-open contradict each other: give one")
        for endpoint in filter(None, (self.endpoint, self.replay)):
            tcp = _TCP.fullmatch(endpoint)
            if tcp is None and not _IPC.fullmatch(endpoint):
                raise InvalidConfig(f"events: {endpoint}: expected tcp://HOST:PORT or ipc:///PATH")
            if tcp is not None and not self._is_guarded and not _is_loopback(tcp["host"].strip("[]")):
                raise InvalidConfig(
                    f"events: {endpoint} can be reached from other machines, without authentication: give"
                    " --events-keys, or an address of this machine alone; or --events-open, where the network"
                    " lets in nobody else"
                )

    @property
    def _is_guarded(self) -> bool:
        return self.keys is not None or self.is_open


def media_words(text: str) -> dict[str, str]:
    """Return what media are called by ``TIER=WORD,…``, by their words in ``MEDIUM_WORDS``.

    Raises:
        InvalidConfig: there is no such tier, or the word is none.
    """
    words: dict[str, str] = {}
    for item in text.split(","):
        tier, equals, word = item.strip().partition("=")
        if not equals or tier not in _TIERS or not _WORD.fullmatch(word):
            raise InvalidConfig(
                f"--events-media: {item.strip()!r}, expected TIER=WORD with one of {', '.join(_TIERS)}, and a"
                " word of up to 32 letters, digits, _ . -"
            )
        words[_TIERS[tier]] = word
    return words


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
