"""Write the generated parts of the Helm chart: ``.venv/bin/python scripts/chart_reference.py``. Tested.

They are the table in README.md, from the comments in values.yaml, and in values.schema.json the keys of the
store's configuration that may be given.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config import ConfigKey, config_keys
from kvstore.config_values import Kind
from kvstore.policy_plan import POLICY_NAMES

CHART = Path(__file__).resolve().parents[1] / "helm" / "kvstore"

_BEGIN, _END = "<!-- values -->\n", "<!-- end -->"
_KEY = re.compile(r"^( *)([A-Za-z_]+):(?: (.*))?$")

# The chart writes these itself: paths in its volumes, places of its Secrets, addresses of its Services.
_OF_THE_CHART = {
    ("server", "socket"),
    ("http", "listen"),
    ("http", "api_keys"),
    ("http", "tls_folder"),
    ("tiers.ssd", "path"),
    ("tiers.ssd", "capacity_bytes"),
    ("tiers.remote", "url"),
    ("tiers.remote", "username"),
    ("tiers.remote", "password"),
    ("tiers.remote", "tls_folder"),
    ("encryption", "keys"),
}

_TYPES: dict[Kind, dict[str, Any]] = {
    Kind.SIZE: {"$ref": "#/$defs/size"},
    Kind.DURATION: {"type": "number"},
    Kind.COUNT: {"type": "integer"},
    Kind.RATIO: {"type": "number"},
    Kind.RATE: {"type": "number"},
    Kind.FLAG: {"type": "boolean"},
    Kind.NAME: {"type": "string", "minLength": 1},
    Kind.NAMES: {"type": "array", "items": {"type": "string", "minLength": 1}},
}

_POLICY = f" *([A-Za-z0-9@_-]+ *= *)?({'|'.join(name.replace('-', '-?') for name in POLICY_NAMES)}) *"


@dataclass(frozen=True, slots=True)
class DocumentedValue:
    """One key of values.yaml: its dotted path, its default as it stands there, and its comment."""

    path: str
    default: str
    meaning: str


def documented_values(text: str) -> list[DocumentedValue]:
    """Return the keys of a values.yaml that a comment with ``# --`` stands above, in their order."""
    found: list[DocumentedValue] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped[5:]]
        elif stripped.startswith("# ") and comment:
            comment.append(stripped[2:])
        elif match := _KEY.match(line):
            indent = len(match[1])
            path = [at for at in path if at[0] < indent] + [(indent, match[2])]
            if comment:
                default = match[3] or _nested_default(lines[number + 1 :], indent)
                found.append(DocumentedValue(".".join(name for _, name in path), default, " ".join(comment)))
            comment = []
        else:
            comment = []
    return found


def _nested_default(following: list[str], indent: int) -> str:
    """Return the keys below one as ``{a, b}``."""
    inner = []
    for line in following:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        inner.append(line)
    width = min((len(line) - len(line.lstrip()) for line in inner if line.strip()), default=0)
    names = [match[2] for line in inner if (match := _KEY.match(line)) and len(match[1]) == width]
    return "{" + ", ".join(names) + "}"


def readme() -> str:
    """Return the chart's README.md with its table of values; all else of it is written by hand."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        raise LookupError("helm/kvstore/README.md has no place for the table of values")
    values = documented_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = [f"| `{at.path}` | `{at.default}` | {_cell(at.meaning)} |" for at in values]
    table = "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])
    return f"{head}{begin}{table}\n{end}{tail}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def schema() -> str:
    """Return values.schema.json with the keys of the store's configuration."""
    document: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for key in config_keys():
        if (key.section, key.name) not in _OF_THE_CHART:
            _section(config, key.section)["properties"][key.name] = _rule(key)
    document["properties"]["config"] = config
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of ``[tiers.dram]``, made where it is not there."""
    section = config
    for part in name.split("."):
        empty: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
        section = section["properties"].setdefault(part, empty)
    return section


def _rule(key: ConfigKey) -> dict[str, Any]:
    rule = {"description": key.rule.doc}
    if key.rule.kind is Kind.CHOICE:
        return rule | {"enum": list(key.rule.choices)}
    if key.rule.kind is Kind.POLICIES:
        plan = {"type": "string", "pattern": f"^{_POLICY}(,{_POLICY})*$"}
        return rule | {"anyOf": [plan, {"type": "array", "items": plan, "minItems": 1}]}
    if key.rule.kind is Kind.SIZE:
        return _TYPES[Kind.SIZE]
    bounded = dict(_TYPES[key.rule.kind])
    if key.rule.kind in (Kind.DURATION, Kind.COUNT, Kind.RATIO, Kind.RATE):
        bounded |= {"minimum": key.rule.low, "maximum": key.rule.high}
    return rule | bounded


PAGES = {"README.md": readme, "values.schema.json": schema}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (CHART / name).write_text(page(), encoding="utf-8")
