"""What the HTTP face has seen; part of its stats."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HttpCounters:
    """Counts since the start. ``requests`` are by operation, ``errors`` by code: closed sets."""

    connections: int = 0
    open_connections: int = 0
    refused_connections: int = 0
    ended_newcomers: int = 0
    failed_handshakes: int = 0
    slow_clients: int = 0
    malformed_requests: int = 0
    damaged_blocks: int = 0
    refused_leases: int = 0
    unread_leases: int = 0
    refused_bodies: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "connections": self.connections,
            "open_connections": self.open_connections,
            "refused_connections": self.refused_connections,
            "ended_newcomers": self.ended_newcomers,
            "failed_handshakes": self.failed_handshakes,
            "slow_clients": self.slow_clients,
            "malformed_requests": self.malformed_requests,
            "damaged_blocks": self.damaged_blocks,
            "refused_leases": self.refused_leases,
            "unread_leases": self.unread_leases,
            "refused_bodies": self.refused_bodies,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "requests": dict(self.requests),
            "errors": dict(self.errors),
        }
