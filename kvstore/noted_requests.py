"""What an access log is told of requests: those of the data path, by what they do."""

from kvstore.access_log import Access, AccessLog
from kvstore.message_fields import ChainRequest
from kvstore.messages import (
    Fetch,
    LeaseChain,
    Match,
    MatchAndLease,
    NoteReads,
    Peek,
    Request,
    Reserve,
    Store,
)
from kvstore.results import Owner

_ACCESSES: dict[type[Request], Access] = {
    Match: Access.LOOK,
    MatchAndLease: Access.LOOK,
    Peek: Access.PEEK,
    NoteReads: Access.PEEK,
    Fetch: Access.TAKE,
    LeaseChain: Access.TAKE,
    Reserve: Access.STORE,
    Store: Access.STORE,
}


def note_access(log: AccessLog, owner: Owner, request: Request) -> None:
    """Tell the log of a client's request, if it is one of the data path."""
    access = _ACCESSES.get(type(request))
    if access is not None and isinstance(request, ChainRequest | Store | NoteReads):
        log.note(owner, access, request.about.chain, request.about.part)
