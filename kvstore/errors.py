"""Errors that callers may catch. A miss, a full queue and an outage of a slow tier are results instead."""


class KVStoreError(Exception):
    """Root of every error this product raises on purpose."""


class InvalidConfig(KVStoreError):
    """A configuration names an unknown key, a bad value, or something this machine cannot offer."""


class InvalidLayout(KVStoreError):
    """A block layout or part is malformed, or does not fit what it is used with."""


class InvalidTokens(KVStoreError):
    """Tokens that cannot be named: not integers, or outside 0..2**32-1."""


class InvalidRequest(KVStoreError):
    """A request that no state of the store could serve: wrong sizes, unknown namespace, too many keys."""


class InvalidTrace(KVStoreError):
    """A recorded trace cannot be read, or does not hold what its format has."""


class NamespaceNotOpen(InvalidRequest):
    """The store does not know the namespace, or has forgotten it because it was empty: open it (again)."""


class RejectedRequest(InvalidRequest):
    """The server calls a request invalid that its client found right: it was damaged on the way, or the two
    are of different versions. Calls of the data path do not raise it: it is a miss.
    """


class Unauthorized(KVStoreError):
    """The server wants an API key, and there is none, or one that it does not know."""


class TooManyFailures(Unauthorized):
    """The same, from an address that has sent too many such requests; ``wait_s`` is when to try again."""

    def __init__(self, message: str, *, wait_s: int = 1) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Forbidden(KVStoreError):
    """The caller is known, and may not do this: its key lacks the scope, or the namespace is not its own."""


class TierFull(KVStoreError):
    """A tier has no free slot and nothing in it may be evicted."""


class TierUnavailable(KVStoreError):
    """A tier cannot be opened or has failed: disk gone, folder locked, read-only, corrupt index."""


class CorruptBlock(KVStoreError):
    """Stored bytes do not agree with their header, key, layout, length or checksum."""


class EpochEnded(KVStoreError):
    """The namespace's epoch has ended: nothing of it is stored or served. On the data path a result."""


class ServerUnavailable(KVStoreError):
    """No server answers at the address, or it went away while a control call needed it."""


class TimedOut(ServerUnavailable):
    """The server did not answer within the call's time, or gave a request up at its own limit."""


class ProtocolMismatch(KVStoreError):
    """The peer speaks another version of the protocol, or sent a frame that breaks it."""


class OtherVersion(ProtocolMismatch):
    """The peer speaks another version of the protocol: ``version``."""

    def __init__(self, message: str, *, version: int) -> None:
        super().__init__(message)
        self.version = version


class UnsupportedModel(KVStoreError):
    """A model file that is damaged, of an unknown architecture, or beyond what the engine runs."""


class PromptTooLong(KVStoreError):
    """A prompt, or prompt and requested output, exceeds the model's context."""
