"""RemoteUrl: what the remote tier's url says: one server, sentinels or a cluster, and where they listen."""

import enum
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kvstore.errors import InvalidConfig
from kvstore_tiers.resp_address import RespAddress

_SENTINEL_PORT = 26379


class Topology(enum.Enum):
    """How the servers behind a url belong together; the text is the scheme's suffix."""

    SINGLE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """Parsed form of a single server's url, or of ``redis+sentinel://host:port,host:port/db`` or
    ``redis+cluster://host:port,host:port``. With TLS the scheme begins ``rediss``.

    ``seeds`` is the server, or the sentinels, or some nodes of the cluster.
    """

    topology: Topology
    seeds: tuple[RespAddress, ...]

    @classmethod
    def parse(cls, url: str, *, user: str = "", password: str = "") -> "RemoteUrl":
        """Return what a url says; ``user`` and ``password`` take precedence over those in it.

        Raises:
            InvalidConfig: another scheme, or a part that is missing or wrong. Never quotes the credentials.
        """
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidConfig(f"remote: the url has a bad port or host: {EXPECTED}") from error
        scheme, _, suffix = parts.scheme.partition("+")
        if not suffix:
            return cls(Topology.SINGLE, (RespAddress.parse(url, user=user, password=password),))
        if scheme not in {"redis", "rediss"} or suffix not in {"sentinel", "cluster"}:
            raise InvalidConfig(f"remote: the url names no server: {EXPECTED}")
        topology = Topology(suffix)
        login, at, hosts = parts.netloc.rpartition("@")
        seeds = tuple(
            RespAddress.parse(f"{scheme}://{login}{at}{host}{parts.path}", user=user, password=password)
            for host in hosts.split(",")
        )
        if topology is Topology.SENTINEL:
            has_port = [_has_port(host) for host in hosts.split(",")]
            seeds = tuple(
                seed if has else replace(seed, port=_SENTINEL_PORT)
                for seed, has in zip(seeds, has_port, strict=True)
            )
        elif seeds[0].db:
            raise InvalidConfig("remote: the url names a database, and a cluster has only database 0")
        return cls(topology, seeds)

    @property
    def is_tls(self) -> bool:
        """Whether every connection is encrypted."""
        return self.seeds[0].is_tls

    def __str__(self) -> str:
        """Return the addresses for messages, without credentials."""
        seeds = ", ".join(str(seed) for seed in self.seeds)
        return f"{self.topology.value} {seeds}".strip()


EXPECTED = (
    "expected redis://host:port/db, unix:///path, redis+sentinel://host:port,host:port/db or"
    " redis+cluster://host:port,host:port; rediss for TLS"
)


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]
