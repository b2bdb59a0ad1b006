"""What a server has seen of its clients; part of its stats."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ServerCounters:
    """What a server has seen; part of its stats."""

    connections: int = 0
    refused_connections: int = 0
    protocol_errors: int = 0
    silent_greetings: int = 0
    idle_ended: int = 0
    slow_readers: int = 0
    lingering: int = 0
    failed_requests: int = 0
    corrupt_reports: int = 0
    requests: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "connections": self.connections,
            "refused_connections": self.refused_connections,
            "protocol_errors": self.protocol_errors,
            "silent_greetings": self.silent_greetings,
            "idle_ended": self.idle_ended,
            "slow_readers": self.slow_readers,
            "lingering": self.lingering,
            "failed_requests": self.failed_requests,
            "corrupt_reports": self.corrupt_reports,
            "requests": dict(self.requests),
        }
