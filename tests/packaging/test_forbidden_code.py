"""What no code of the product may do: run or rebuild what bytes from elsewhere describe, or weaken TLS."""

import ast
import importlib.util
from pathlib import Path

import pytest

PACKAGES = ["kvstore", "kvstore_tiers", "kvstore_kernels", "kvstore_engine_adapter"]
BESIDE = Path(__file__).parents[2]

MODULES = {
    "cPickle", "cloudpickle", "code", "codeop", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve",
    "telnetlib", "xmlrpc",
}  # fmt: skip
CALLS = {
    "__import__", "compile", "eval", "exec", "os.popen", "os.system", "runpy.run_path",
    "ssl._create_unverified_context", "tempfile.mktemp",
}  # fmt: skip
ATTRIBUTES = {"ssl.CERT_NONE", "ssl.PROTOCOL_TLS", "ssl.PROTOCOL_SSLv23", "hashlib.md5", "hashlib.sha1"}


def sources():
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations:
            yield from sorted(Path(folder).rglob("*.py"))
    for name in ("benchmarks", "scripts"):
        yield from sorted((BESIDE / name).rglob("*.py"))


def breaches(tree):
    """Yield what a tree does that is forbidden, as (line, text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in MODULES:
                yield node.lineno, f"imports {name}"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ATTRIBUTES:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call):
            yield from call_breaches(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(".check_hostname"):
            yield node.lineno, ast.unparse(node)


def call_breaches(node):
    name = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in CALLS:
        yield node.lineno, f"calls {name}"
    if name.endswith("torch.load") and given.get("weights_only") != "True":
        yield node.lineno, "torch.load without weights_only=True"
    if given.get("allow_pickle", "False") != "False":
        yield node.lineno, f"{name} with allow_pickle"
    if given.get("shell", "False") != "False":
        yield node.lineno, f"{name} with a shell"
    if name in ("yaml.load", "yaml.unsafe_load"):
        yield node.lineno, name


def test_there_is_code_to_look_at():
    assert len(list(sources())) > 100


def test_no_code_runs_or_rebuilds_what_bytes_describe():
    found = [
        f"{path}:{line}: {text}"
        for path in sources()
        for line, text in breaches(ast.parse(path.read_text(encoding="utf-8")))
    ]

    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from marshal import loads",
        "def f():\n    import shelve",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run(words, shell=True)",
        "context.check_hostname = False",
        "context.verify_mode = ssl.CERT_NONE",
        "hashlib.md5(data)",
    ],
)
def test_what_is_forbidden_is_found(code):
    assert list(breaches(ast.parse(code)))


def test_what_is_allowed_is_not_found():
    code = "torch.load(p, weights_only=True); np.load(p); re.compile('a'); subprocess.run(w, shell=False)"

    assert not list(breaches(ast.parse(code)))


@pytest.mark.parametrize("module", ["kvstore.keys", "kvstore.auth"])
def test_what_tells_blocks_and_callers_apart_uses_no_fast_hash(module):
    """Collisions of xxHash can be made on purpose."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
    }

    assert "hashlib" in imported
    assert not imported & {"xxhash", "zlib", "kvstore.checksum", "random"}
