"""The JSON Schemas of the API: what requests may hold and answers do hold."""

from typing import Any

from kvstore.hints import MAX_NEXT_USE_S, MAX_OUTPUT_TOKENS, MAX_PRIORITY
from kvstore.hottest import MAX_TOLD
from kvstore.http.limits import MAX_KEYS, MAX_TIMEOUT_S
from kvstore.http.schema import HEX_KEY_PATTERN, Schema
from kvstore.layout import DTYPE_BYTES, MAX_BLOCK_BYTES
from kvstore.miss import MissReason
from kvstore.policy_plan import MAX_PLAN_CHARS
from kvstore.records import (
    COLLECTION_PATTERN,
    MAX_LISTED_RECORDS,
    MAX_TTL_S,
    MAX_VERSION,
    MIN_TTL_S,
    NAME_PATTERN,
    PREFIX_PATTERN,
    RecordAbsence,
    RecordOutcome,
    RecordPlace,
)

MAX_WHY_BLOCKS = 1000
"""Blocks that one ``why`` explains."""

_U16 = 0xFFFF
_U32 = 0xFFFF_FFFF
_I63 = (1 << 63) - 1


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _lookup(properties: dict[str, Schema]) -> Schema:
    """Return the schema of a request about blocks that are named by keys or by tokens."""
    return {
        **_object(properties, "namespace"),
        "oneOf": [{"required": ["keys"]}, {"required": ["tokens"]}],
    }


def _integer(low: int, high: int, text: str = "") -> Schema:
    return _told({"type": "integer", "minimum": low, "maximum": high}, text)


def _count(text: str = "") -> Schema:
    return _told({"type": "integer", "minimum": 0}, text)


def _list(items: Schema, *, most: int, text: str = "", **more: Any) -> Schema:  # Any: JSON
    return _told({"type": "array", "items": items, "maxItems": most, **more}, text)


def _told(schema: dict[str, Any], text: str) -> Schema:  # Any: JSON
    return {**schema, "description": text} if text else schema


def _text(text: str = "", *, most: int = 4096, least: int = 0) -> Schema:
    return _told({"type": "string", "minLength": least, "maxLength": most}, text)


KEY: Schema = {"type": "string", "pattern": HEX_KEY_PATTERN}
BLOCK_KEY: Schema = {**KEY, "description": "Key of the block."}
LEASE_NAME: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$", "description": "Name of the lease."}
NAMESPACE: Schema = {**KEY, "description": "Digest of an open namespace."}
CHECKSUM: Schema = {"type": "string", "pattern": "^[0-9a-f]{16}$", "description": "xxh3-64 of a payload."}
PARENT: Schema = {**KEY, "description": "Key of the block before the first; given exactly if start is not 0."}
START = _integer(0, _U32, "Index of the first block in its token sequence.")
TIMEOUT: Schema = {
    "type": "number",
    "minimum": 0,
    "maximum": MAX_TIMEOUT_S,
    "description": "Seconds that the store may take; what is not ready then is a miss.",
}
REASON: Schema = {
    "type": ["string", "null"],
    "enum": [None, *sorted(reason.value for reason in MissReason)],
    "description": "Why no more blocks are served; null if all are.",
}
PART_TEXT: Schema = {
    "type": "string",
    "pattern": "^[0-9]{1,5},[0-9]{1,5},[0-9]{1,5},[0-9]{1,5}$",
    "description": "Part of the block: first layer, that after the last, first KV head, that after the last.",
}
_PART = _list(
    _integer(0, _U16),
    most=4,
    minItems=4,
    text="Part of each block: first layer, that after the last, first KV head, that after the last.",
)
_KEYS = _list(KEY, most=MAX_KEYS, uniqueItems=True, text="Keys of consecutive blocks.")
HINTS = _object(
    {
        "ends_session": {"type": "boolean", "description": "Nobody goes on from these blocks."},
        "is_one_off": {"type": "boolean", "description": "Nobody asks for the new blocks again."},
        "next_use_s": {
            "type": "number",
            "minimum": 0,
            "maximum": MAX_NEXT_USE_S,
            "description": "Seconds until the blocks are expected to be used again.",
        },
        "priority": _integer(-MAX_PRIORITY, MAX_PRIORITY, "Each step up makes a block worth twice as much."),
        "output_tokens": _integer(0, MAX_OUTPUT_TOKENS, "Length of the answer."),
    }
)
_CHAIN: dict[str, Schema] = {
    "namespace": NAMESPACE,
    "keys": _KEYS,
    "start": START,
    "parent": PARENT,
    "part": _PART,
}
_TOKENS = _list(
    _integer(0, _U32),
    most=1 << 20,
    text="In place of keys: the tokens of a whole sequence; its full blocks are meant.",
)
_LOOKUP: dict[str, Schema] = {**_CHAIN, "tokens": _TOKENS, "timeout_s": TIMEOUT}
_LEASE_S: Schema = {
    "type": "number",
    "minimum": 0,
    "maximum": 3600,
    "description": "Seconds until the lease ends by itself; at most lease_s of [store].",
}

MATCH = _lookup(
    {
        **_LOOKUP,
        "lease": {"type": "boolean", "description": "Lease those of them that are in memory."},
        "lease_s": _LEASE_S,
    }
)
LEASE = _lookup({**_LOOKUP, "lease_s": _LEASE_S, "hints": HINTS})
LOOKUP = _lookup(_LOOKUP)
FETCH = _lookup({**_LOOKUP, "hints": HINTS})
NOTE_HINTS = _lookup({**_LOOKUP, "hints": HINTS})
NOTE_HINTS["required"].append("hints")
EXISTS = _object(
    {
        "namespace": NAMESPACE,
        "keys": _list(KEY, most=MAX_KEYS, text="Keys of blocks, in any order."),
        "part": _PART,
        "timeout_s": TIMEOUT,
    },
    "namespace",
    "keys",
)
WHY = _lookup(
    {
        **_LOOKUP,
        "keys": _list(KEY, most=MAX_WHY_BLOCKS, uniqueItems=True, text="Keys of consecutive blocks."),
    }
)
STORE_HEAD = _object(
    {
        **_CHAIN,
        "length_bytes": _count("Bytes of each payload, to be compared."),
        "checksums": _list(CHECKSUM, most=MAX_KEYS, text="One per key; a block with another is not stored."),
        "timeout_s": TIMEOUT,
        "hints": HINTS,
    },
    "namespace",
    "keys",
)
OPEN_NAMESPACE = _object(
    {
        "model": _text("Name of the model."),
        "layout": _object(
            {
                "dtype": {"type": "string", "enum": list(DTYPE_BYTES)},
                "num_layers": _integer(1, _U16),
                "block_tokens": _integer(1, _U16),
                "num_kv_heads": _integer(1, _U16),
                "head_dim": _integer(1, MAX_BLOCK_BYTES),
                "kv_planes": _integer(1, _U16, "Default: 2, keys and values."),
                "order": _text("Order of the axes.", most=64, least=1),
            },
            "dtype",
            "num_layers",
            "block_tokens",
            "num_kv_heads",
            "head_dim",
        ),
        "weights": _text("Digest or revision of the weights."),
        "tokenizer": _text("Digest of the tokenizer."),
        "adapter": _text("Digest of the adapter; empty: none."),
        "rope": _text("The rotary parameters in force."),
        "epoch": _integer(0, _I63, "Epoch of the model."),
        "tenant_salt": {
            "type": "string",
            "pattern": "^([0-9a-f]{2}){0,4096}$",
            "description": "Of the caller's tenant; best left out: the server fills it in.",
        },
        "public": {"type": "boolean", "description": "Ask for the namespace that tenants share."},
    },
    "model",
    "layout",
)
COLLECTION: Schema = {
    "type": "string",
    "pattern": COLLECTION_PATTERN,
    "description": "Name of the collection.",
}
RECORD_NAME: Schema = {"type": "string", "pattern": NAME_PATTERN, "description": "Name of the record."}
RECORD_PREFIX: Schema = {
    "type": "string",
    "pattern": PREFIX_PATTERN,
    "description": "What the names begin with.",
}
RECORD_AFTER: Schema = {
    "type": "string",
    "pattern": PREFIX_PATTERN,
    "description": "The last name of the listing before.",
}
RECORD_LIMIT = _integer(1, MAX_LISTED_RECORDS, "Records to name at most.")
RECORD_TTL: Schema = {
    "type": "number",
    "minimum": MIN_TTL_S,
    "maximum": MAX_TTL_S,
    "description": "Seconds that the record is kept; absent: the longest time.",
}
RECORD_TOKEN: Schema = {
    "type": "string",
    "pattern": "^[0-9a-f]{32}$",
    "description": "A name for the put: the same one again is the same put.",
}
RECORD_CONDITION: Schema = {
    "type": "string",
    "pattern": '^"[0-9]{1,16}"$',
    "description": "Only if the record has this version, as its ETag gives it.",
}
RECORD_ABSENCE: Schema = {
    "type": "string",
    "enum": ["*"],
    "description": "Only if there is no such record.",
}
TENANT_SALT: Schema = {
    "type": "string",
    "pattern": "^([0-9a-f]{2}){0,4096}$",
    "description": "Of the caller's tenant; best left out: the server fills it in.",
}
FLUSH = _object({"timeout_s": TIMEOUT})
CHECK = _object(
    {"sample_blocks": _integer(0, 1_000_000, "Blocks whose bytes are read."), "timeout_s": TIMEOUT}
)
POLICY = _object(
    {
        "policy": _text(
            "Name of a policy, for every tier and namespace, or PLACE=NAME (default: none of its own), or"
            " several of these with commas"
            " between: a place is a tier, a namespace's digest, or DIGEST@TIER.",
            most=MAX_PLAN_CHARS,
        )
    },
    "policy",
)
EPOCH = _object({"model": _text("Name of the model.")}, "model")
ERASE: Schema = {
    **_object(
        {
            "tenant_id": {**KEY, "description": "Id of the tenant, which follows from its salt."},
            "namespace": {**KEY, "description": "Digest of an open namespace of the tenant."},
        }
    ),
    "oneOf": [{"required": ["tenant_id"]}, {"required": ["namespace"]}],
}

ERROR = _object(
    {"error": _object({"code": {"type": "string"}, "message": {"type": "string"}}, "code", "message")},
    "error",
)
MISS = _object(
    {
        "error": ERROR["properties"]["error"],
        "reason": {**REASON, "type": "string", "enum": REASON["enum"][1:]},
    },
    "error",
)
IDENTITY_ANSWER = _object(
    {"name": {"type": "string"}, "tenant": {"type": "string"}, "scopes": _list({"type": "string"}, most=3)},
    "name",
    "tenant",
    "scopes",
)
NAMESPACE_ANSWER = _object(
    {
        "namespace": NAMESPACE,
        "tenant_salt": {
            "type": "string",
            "description": "The salt in force, in hex; a secret of the tenant.",
        },
        "block_bytes": _count("Bytes of a whole block."),
    },
    "namespace",
    "tenant_salt",
    "block_bytes",
)
MATCH_ANSWER = _object(
    {
        "blocks": _count("Leading blocks that are stored."),
        "tiers": _list({"type": "string"}, most=MAX_KEYS, text="Fastest tier of each."),
        "reason": REASON,
        "lease": {
            "type": ["string", "null"],
            "description": "Name that the lease is ended by; null: there is none.",
        },
        "leased": _count("Leading blocks that are leased."),
        "lease_reason": {
            **REASON,
            "description": "Why no more of the blocks in memory are leased; null if they are.",
        },
        "lease_s": {"type": "number", "description": "Seconds until it ends by itself."},
    },
    "blocks",
    "tiers",
    "reason",
)
EXISTS_ANSWER = _object(
    {"present": _list({"type": "boolean"}, most=MAX_KEYS, text="One per key.")}, "present"
)
HINTS_ANSWER = _object({"noted": {"type": "boolean"}}, "noted")
PREFETCH_ANSWER = _object({"blocks": _count("Leading blocks that are in memory.")}, "blocks")
WHY_ANSWER = _object(
    {"blocks": _list({"type": "object"}, most=MAX_WHY_BLOCKS, text="One report per block.")}, "blocks"
)
PUT_ANSWER = _object(
    {
        "stored": _count("Blocks stored by this request."),
        "present": _count("Blocks that were stored already."),
        "dropped": _count("Blocks that found no room."),
        "doubtful": _list(_count(), most=MAX_KEYS, text="Positions of blocks not known to be stored."),
        "reason": {**REASON, "description": "Why blocks were dropped; null if none was."},
    },
    "stored",
    "present",
    "dropped",
)
BRANCH_LIMIT = _integer(1, MAX_TOLD, "Branches to tell at most.")
_COUNTED = _object(
    {"lookups": _count(), "hits": _count("Of them, those that found all of it.")}, "lookups", "hits"
)
_BRANCH: dict[str, Schema] = {
    "key": {**KEY, "description": "Key of its last block, as far as it is known."},
    "namespace": NAMESPACE,
    "tenant": {
        **KEY,
        "type": ["string", "null"],
        "description": "Id of the tenant; null: not known any more.",
    },
    "parent": {
        **KEY,
        "type": ["string", "null"],
        "description": "Key of the branch that it leaves; null: it begins with the sequence.",
    },
    "leaves_at_blocks": _count("Blocks that it shares with its parent."),
    "blocks": _count("Blocks from the start of the sequence; at least these, at most an eighth more."),
    "tokens": _count("Tokens of these blocks."),
    "match": _COUNTED,
    "fetch": _COUNTED,
    "last_use_s": {"type": "number", "description": "Seconds since it was last looked up."},
    "tiers": {"type": "object", "description": "How many of its blocks are in each tier."},
}
BRANCHES_ANSWER = _object(
    {
        "is_on": {"type": "boolean", "description": "Whether branches are counted."},
        "window_s": _count("Counts are of so many seconds and the running minute."),
        "lookups": _count("Lookups in that time, of all branches that are the caller's to know of."),
        "sample_ratio": {
            "type": "number",
            "description": "Share of the lookups that is sampled; to operators.",
        },
        "lost_samples": _count("Samples that found no room; to operators."),
        "kept_branches": _count("Branches that are kept, hot or not; to operators."),
        "branches": _list(_object(_BRANCH, *_BRANCH), most=MAX_TOLD, text="The hottest first."),
    },
    "is_on",
    "window_s",
    "lookups",
    "branches",
)
DROP_ANSWER = _object({"dropped": _count("Blocks that lost a copy.")}, "dropped")
DEMOTE_ANSWER = _object({"demoted": _count("Blocks that left memory.")}, "demoted")
RENEW_ANSWER = _object({"lease_s": {"type": "number"}}, "lease_s")
RELEASE_ANSWER = _object({"released": {"type": "boolean"}}, "released")
_WRITE = {
    "outcome": {"type": "string", "enum": [outcome.value for outcome in RecordOutcome]},
    "version": _integer(0, MAX_VERSION, "Of the record; 0: there is none, or it is not known."),
    "place": {"type": ["string", "null"], "enum": [None, *(place.value for place in RecordPlace)]},
    "is_doubtful": {"type": "boolean", "description": "Whether it may have been stored all the same."},
    "problem": _text(most=500),
}
RECORD_WRITE_ANSWER = _object(_WRITE, *_WRITE)
RECORD_REFUSED = _object({"error": ERROR["properties"]["error"], **_WRITE}, "error")
RECORD_ABSENT = _object(
    {
        "error": ERROR["properties"]["error"],
        "reason": {"type": "string", "enum": [reason.value for reason in RecordAbsence]},
    },
    "error",
)
RECORD_DROP_ANSWER = _object(
    {"dropped": {"type": "boolean", "description": "Whether there was one."}}, "dropped"
)
RECORDS_ANSWER = _object(
    {
        "records": _list(
            _object(
                {
                    "name": {"type": "string"},
                    "version": _integer(1, MAX_VERSION),
                    "value_bytes": _count(),
                    "expires_in_s": {"type": "number"},
                    "is_current": {"type": "boolean"},
                },
                "name",
                "version",
                "value_bytes",
                "expires_in_s",
                "is_current",
            ),
            most=MAX_LISTED_RECORDS,
            text="By name.",
        )
    },
    "records",
)
FLUSH_ANSWER = _object(
    {"flushed": {"type": "boolean", "description": "Whether all was written in time."}}, "flushed"
)
CHECK_ANSWER = _object({"problems": _list({"type": "string"}, most=200)}, "problems")
POLICY_ANSWER = _object(
    {"before": {"type": "string", "description": "What held before, in the same words."}}, "before"
)
EPOCH_ANSWER = _object({"epoch": _count("The new epoch.")}, "epoch")
ERASE_ANSWER = _object(
    {
        "is_complete": {"type": "boolean", "description": "Whether the key is gone everywhere."},
        "keys": _count("Keys that were destroyed."),
        "blocks": {"type": "object", "description": "Blocks that were forgotten, by tier."},
        "leased_blocks": _count("Of them, those that are overwritten when their leases end."),
        "problems": _list({"type": "string"}, most=64, text="What is tried again."),
        "records": _count("Records that were removed."),
    },
    "is_complete",
    "keys",
    "blocks",
    "leased_blocks",
    "problems",
)
NAMESPACES_ANSWER = _object({"namespaces": _list({"type": "object"}, most=256)}, "namespaces")
STATUS_ANSWER = _object({"status": {"type": "string"}}, "status")
ANY_OBJECT: Schema = {"type": "object"}
