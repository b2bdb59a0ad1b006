"""Who a caller is and what it may do: Scope, Identity, Keyring, and Tenancy, which namespaces it may use.

A keyring is text, one statement a line::

    # comment
    secret <64 or more hex digits>
    key <name> <tenant> <scopes, joined by commas> <SHA-256 of the key's text, hex>

It holds no key, only digests of keys, and the secret that the tenants' salts derive from. That secret is the
same on all nodes that share a remote tier, and decides what every tenant's blocks are called: with another
one, all that is stored for tenants is out of reach.
"""

import enum
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvstore.errors import Forbidden, InvalidConfig
from kvstore.keys import Namespace

KEYRING_MAX_BYTES = 1 << 20
"""Longest text of a keyring."""

MAX_KEYS = 1024
"""Most keys in a keyring; each is compared at each request (measured: about 0.04 us each, 2 cores)."""

SECRET_MIN_BYTES = 32
"""Shortest secret of a keyring."""

ANY_MODEL = "*"
"""In the list of public models: every model."""

_SALT_TAG = b"kvstore.tenant.v1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RESERVED_NAMES = ("local",)


class Scope(enum.Enum):
    """What a key allows; none implies another."""

    READ = "read"
    """Look up, fetch, lease and prefetch the tenant's own blocks."""

    WRITE = "write"
    """Store the tenant's own blocks, and delete them."""

    ADMIN = "admin"
    """See and change the state of the whole store; no tenant's blocks."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a caller is. ``salt`` goes into the names of its blocks, and only there; it is never shown.

    ``tenant`` is empty, and so is ``salt``, exactly for the operator: whoever reaches the Unix socket, or the
    HTTP port of a store without keys. An operator chooses salts itself.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]
    salt: bytes = field(repr=False)

    @property
    def is_operator(self) -> bool:
        """Whether this is whoever runs the machine, not a tenant."""
        return not self.tenant

    def may(self, scope: Scope) -> bool:
        """Whether the caller has a scope."""
        return scope in self.scopes


LOCAL = Identity(name="local", tenant="", scopes=frozenset(Scope), salt=b"")
"""The operator."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key of a keyring: whose it is and what it allows. ``digest`` is the SHA-256 of its text."""

    name: str
    tenant: str
    scopes: frozenset[Scope]
    digest: bytes = field(repr=False)


class Keyring:
    """The keys that a server knows. Immutable; its text form shows no secret.

    Raises:
        InvalidConfig: two keys have one name or one text, there are more than ``MAX_KEYS``, or the secret is
            shorter than ``SECRET_MIN_BYTES``.
    """

    __slots__ = ("_callers", "_records", "_secret")

    def __init__(self, secret: bytes, records: Sequence[KeyRecord]) -> None:
        if len(secret) < SECRET_MIN_BYTES:
            raise InvalidConfig(f"keyring: its secret has {len(secret)} bytes, at least {SECRET_MIN_BYTES}")
        if len(records) > MAX_KEYS:
            raise InvalidConfig(f"keyring: {len(records)} keys, at most {MAX_KEYS}")
        if len({record.name for record in records}) < len(records):
            raise InvalidConfig("keyring: two keys have the same name: rename one")
        if len({record.digest for record in records}) < len(records):
            raise InvalidConfig("keyring: two keys have the same text: remove one")
        self._secret = secret
        self._records = tuple(records)
        self._callers = tuple(
            (record.digest, Identity(record.name, record.tenant, record.scopes, self.salt(record.tenant)))
            for record in records
        )

    @classmethod
    def parse(cls, text: str, *, source: str = "keyring") -> "Keyring":
        """Read a keyring's text. ``source`` names its origin in messages, which never quote the text.

        Raises:
            InvalidConfig: a line is no statement, the secret is missing or there are two, or as the class.
        """
        secret: bytes | None = None
        records: list[KeyRecord] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            where = f"{source}: line {number}"
            match words:
                case []:
                    continue
                case ["secret", digits]:
                    if secret is not None:
                        raise InvalidConfig(f"{where}: a second secret: keep one")
                    secret = _secret(digits, where)
                case ["key", name, tenant, scopes, digest]:
                    records.append(_record(name, tenant, scopes, digest, where=where))
                case _:
                    raise InvalidConfig(
                        f"{where}: expected 'secret HEX' or 'key NAME TENANT SCOPES SHA256': see kvstore keys"
                    )
        if secret is None:
            raise InvalidConfig(f"{source}: has no line 'secret HEX': make the file with kvstore keys init")
        try:
            return cls(secret, records)
        except InvalidConfig as error:
            raise InvalidConfig(f"{source}: {error}") from None

    def identify(self, key: str) -> Identity | None:
        """Return whose key this is, None if nobody's.

        Takes the same time for every key: digests of one length are compared in constant time, with all.
        """
        digest = key_digest(key)
        found: Identity | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def salt(self, tenant: str) -> bytes:
        """Return a tenant's salt, 32 bytes: what its namespaces carry as ``tenant_salt``. Secret."""
        return hmac.digest(self._secret, _SALT_TAG + tenant.encode(), "sha256")

    def has_secret_of(self, other: "Keyring") -> bool:
        """Whether tenants have the same salts by both keyrings."""
        return hmac.compare_digest(self._secret, other._secret)

    @property
    def records(self) -> tuple[KeyRecord, ...]:
        """The keys, in the order of the text."""
        return self._records

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Keyring({len(self)} keys)"


class Tenancy:
    """Which namespaces a caller may use: its tenant's own, and those of public models that carry no salt."""

    def __init__(self, public_models: Sequence[str] = ()) -> None:
        self._public_models = frozenset(public_models)

    def claim(self, identity: Identity, namespace: Namespace, *, is_public: bool = False) -> Namespace:
        """Return the namespace to open for a caller that describes one: with its tenant's salt.

        A caller may leave ``tenant_salt`` empty; ``is_public`` asks for the shared namespace of the model
        instead of the tenant's own.

        Raises:
            Forbidden: the salt is not the tenant's, or the model has no shared namespace.
        """
        if is_public:
            if namespace.tenant_salt or not (identity.is_operator or self._is_public(namespace.model)):
                raise Forbidden(
                    "namespace: not public here: name the model in public_models of [http], and send no salt"
                )
            return namespace
        if identity.is_operator:
            return namespace
        if not namespace.tenant_salt:
            return replace(namespace, tenant_salt=identity.salt)
        if not hmac.compare_digest(namespace.tenant_salt, identity.salt):
            raise Forbidden("namespace: its salt is not the caller's: send none, the server fills it in")
        return namespace

    def claim_salt(self, identity: Identity, salt: bytes) -> bytes:
        """Return the salt of the tenant that a caller works for: an operator says it, a tenant has its own.

        Raises:
            Forbidden: it is not the caller's.
        """
        if identity.is_operator:
            return salt
        if salt and not hmac.compare_digest(salt, identity.salt):
            raise Forbidden("tenant: its salt is not the caller's: send none, the server fills it in")
        return identity.salt

    def admits(self, identity: Identity, namespace: Namespace | None) -> bool:
        """Whether a caller may use an open namespace; not if it is None, that is unknown.

        An unknown namespace and another tenant's take the same way to the same answer.
        """
        salt = b"" if namespace is None else namespace.tenant_salt
        model = "" if namespace is None else namespace.model
        is_own = hmac.compare_digest(salt, identity.salt) | identity.is_operator
        is_shared = (not salt) & self._is_public(model)
        return (namespace is not None) & (is_own | is_shared)

    def _is_public(self, model: str) -> bool:
        return (model in self._public_models) | (ANY_MODEL in self._public_models)


def key_digest(key: str) -> bytes:
    """Return the digest that a keyring holds of a key's text."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def read_scopes(text: str) -> frozenset[Scope]:
    """Read scopes joined by commas.

    Raises:
        InvalidConfig: none, an unknown one, or one twice.
    """
    words = text.split(",")
    known = {scope.value: scope for scope in Scope}
    if len(set(words)) < len(words) or not set(words) <= set(known):
        raise InvalidConfig(f"scopes: expected some of {', '.join(known)}, joined by commas, each once")
    return frozenset(known[word] for word in words)


def require_name(text: str, what: str) -> str:
    """Return the name of a key or of a tenant if it is one.

    Raises:
        InvalidConfig: it is not.
    """
    if not _NAME.fullmatch(text) or text in _RESERVED_NAMES:
        raise InvalidConfig(
            f"{what}: expected 1 to 64 letters, digits, dots, dashes and underscores, beginning with a letter"
            f" or digit, and not {', '.join(_RESERVED_NAMES)}"
        )
    return text


def _secret(digits: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(digits)
    except ValueError:
        secret = b""
    if len(secret) < SECRET_MIN_BYTES:
        raise InvalidConfig(f"{where}: the secret is not {2 * SECRET_MIN_BYTES} or more hex digits")
    return secret


def _record(name: str, tenant: str, scopes: str, digest: str, *, where: str) -> KeyRecord:
    try:
        if not _DIGEST.fullmatch(digest):
            raise InvalidConfig("the digest is not 64 hex digits in lower case")
        return KeyRecord(
            require_name(name, "name"),
            require_name(tenant, "tenant"),
            read_scopes(scopes),
            bytes.fromhex(digest),
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error}") from None
