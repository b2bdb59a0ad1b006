"""PlainPolicy: what policies have in common that learn nothing which lasts, and heed no hints."""

from collections.abc import Sequence

from kvstore.policy.protocol import Hint, Offer
from kvstore.tier import StorageKey


class PlainPolicy:
    """Takes no notice of hints, offers and refusals, and saves nothing."""

    is_head_first = False

    def note_hint(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint) -> None:
        """Ignore what is said of the future."""

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """Ignore what is only offered."""

    def refuse(self, offer: Offer, *, now_s: float) -> None:
        """Ignore what was not stored."""

    def to_state(self) -> dict[str, object]:
        """Return nothing: what is known is about single blocks."""
        return {}

    def from_state(self, state: dict[str, object]) -> None:
        """Ignore what others learned."""
