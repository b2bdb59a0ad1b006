"""A look at a server when it is first met: what it is, and what about it will cost blocks later.

The rights are tried out on a key that no block has, in forms that change nothing, so that the user needs none
for it. What else is asked is for people; a user who may not ask it (INFO) is not told of.
"""

from dataclasses import dataclass

from kvstore_tiers.remote_control import ControlLine, Refused, Reply

_OLDEST_MAJOR = 6
"""Redis 6 brought ACL users."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Use:
    """What the tier does on its servers. ``expires`` says that every value gets a time to live."""

    key_prefix: str = "kvstore"
    expires: bool = False
    is_cluster: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen. ``server`` is empty if the user may not ask; each remark is a clause with its remedy."""

    server: str
    remarks: tuple[str, ...]


def look(line: ControlLine, use: Use, *, user: str) -> Look:
    """Ask a server what it is and may be used for. Blocks.

    Raises:
        RespFault: no answer in time, or none that parses.
    """
    trials = _trials(use)
    *tried, info = line.ask_all([*trials, ("INFO",)])
    missing = [words[0] for words, answer in zip(trials, tried, strict=True) if _is_missing_right(answer)]
    remarks = [_rights_remark(user or "default", missing, use)] if missing else []
    told = _fields(info)
    if not told:
        return Look("", tuple(remarks))
    remarks += [remark for remark in (_age(told), _role(told), _memory(told, use)) if remark]
    return Look(_describe(told), tuple(remarks))


def _trials(use: Use) -> list[tuple[str, ...]]:
    key = f"{use.key_prefix}:2:rights"
    # XX sets only what is there already, and the time to live ends it if it ever was.
    trials = [("GET", key), ("SET", key, "", "XX", "PX", "1"), ("DEL", key), ("EXISTS", key)]
    if use.is_cluster:
        trials.append(("ASKING",))
    return trials


def _is_missing_right(answer: Reply | Refused) -> bool:
    # Servers look at rights before anything else: MOVED, READONLY and OOM say that it may be asked.
    return isinstance(answer, Refused) and answer.code == "NOPERM"


def _rights_remark(user: str, missing: list[str], use: Use) -> str:
    rights = " ".join(f"+{name.lower()}" for name in missing)
    return (
        f"user {user} may not {', '.join(missing)} there, so blocks are lost:"
        f" ACL SETUSER {user} ~{use.key_prefix}:* {rights}"
    )


def _fields(reply: Reply | Refused) -> dict[str, str]:
    lines = reply.splitlines() if isinstance(reply, str) else []
    pairs = (line.partition(":") for line in lines if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def _number(told: dict[str, str], name: str) -> int:
    text = told.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _describe(told: dict[str, str]) -> str:
    kind = told.get("server_name", "redis").capitalize()
    version = told.get("valkey_version") or told.get("redis_version") or "of unknown version"
    limit = _number(told, "maxmemory")
    memory = f"maxmemory {limit // _MIB} MiB, {told.get('maxmemory_policy')}" if limit else "no maxmemory"
    return f"{kind} {version}, {memory}"[:200]


def _age(told: dict[str, str]) -> str:
    version = told.get("redis_version", "")
    major = version.partition(".")[0]
    if not (major.isascii() and major.isdigit() and len(major) < 4) or int(major) >= _OLDEST_MAJOR:
        return ""
    return f"is version {version[:20]}: {_OLDEST_MAJOR} or later is needed"


def _role(told: dict[str, str]) -> str:
    return (
        "is a replica and refuses writes: name its master in the url" if told.get("role") == "slave" else ""
    )


def _memory(told: dict[str, str], use: Use) -> str:
    if "maxmemory" not in told:
        return ""
    policy = told.get("maxmemory_policy", "")[:40]
    if not _number(told, "maxmemory"):
        return (
            "has no maxmemory and grows until its machine is full: set it, and maxmemory-policy allkeys-lru"
        )
    if policy.startswith("allkeys-") or (policy.startswith("volatile-") and use.expires):
        return ""
    return f"has maxmemory-policy {policy}: when it is full, writes are refused: set allkeys-lru"
