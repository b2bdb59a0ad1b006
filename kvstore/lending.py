"""What an answer lends, and the message that gives it back when nobody takes the answer any more."""

from kvstore.messages import (
    Answer,
    Leased,
    Lent,
    Ready,
    Release,
    Request,
    ReturnSlots,
    Stored,
    UnusedSlot,
)


def giving_back(answer: Answer) -> Request | None:
    """Return the message that ends what an answer lends; None if it lends nothing."""
    match answer:
        case Ready(lease=int(lease)) | Leased(lease=int(lease)):
            return Release(lease)
        case Lent(slots=slots) if slots:
            return ReturnSlots(tuple([UnusedSlot(at.offset, at.generation) for at in slots]))
        case Stored(slots=ahead) if ahead:
            return ReturnSlots(ahead)
        case _:
            return None
