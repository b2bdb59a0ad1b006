"""The keyring's file: private, changed whole, never overwritten; and the command that changes it."""

import concurrent.futures
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.auth import Scope
from kvstore.cli import main
from kvstore.errors import InvalidConfig
from kvstore.keyring_file import add_key, create_keyring, read_keyring, remove_key

READ = frozenset({Scope.READ})


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "keys"
    create_keyring(made)
    return made


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main(["keys", *map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        create_keyring(tmp_path / "keys")
    finally:
        os.umask(before)

    assert mode_of(tmp_path / "keys") == 0o600


def test_two_files_have_different_secrets(tmp_path):
    for name in ("one", "other"):
        create_keyring(tmp_path / name)

    one, other = (read_keyring(tmp_path / name) for name in ("one", "other"))
    assert not one.has_secret_of(other)
    assert one.has_secret_of(one)


@pytest.mark.parametrize("kind", ["file", "link", "link to nowhere", "folder"])
def test_nothing_at_the_path_is_overwritten(tmp_path, kind):
    path, other = tmp_path / "keys", tmp_path / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "link to nowhere":
        path.symlink_to(other)
    else:
        (path if kind == "file" else other).write_text("mine")
        if kind == "link":
            path.symlink_to(other)

    with pytest.raises(InvalidConfig, match="exists: a new secret would put"):
        create_keyring(path)

    assert [left.read_text() for left in (path, other) if left.is_file()] in (["mine"], ["mine"] * 2, [])
    assert not [left for left in tmp_path.iterdir() if left.name.endswith(".new")]


def test_a_key_is_returned_once_and_only_its_digest_is_kept(path):
    key = add_key(path, "engine", tenant="acme", scopes=frozenset({Scope.WRITE, Scope.READ}))

    assert key not in path.read_text()
    caller = read_keyring(path).identify(key)
    assert (caller.name, caller.tenant, caller.scopes) == ("engine", "acme", {Scope.READ, Scope.WRITE})


def test_keys_are_long_random_and_tell_what_they_are(path):
    keys = {add_key(path, f"k{number}", tenant="acme", scopes=READ) for number in range(20)}

    assert len(keys) == 20
    assert {len(key) for key in keys} == {len("kvs_") + 43}  # 43 letters of base64 hold 256 bits
    assert all(key.startswith("kvs_") for key in keys)


def test_a_change_keeps_comments_other_keys_mode_and_link(tmp_path, path):
    kept = add_key(path, "kept", tenant="acme", scopes=READ)
    path.write_text(path.read_text() + "# by hand, no newline at the end")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)

    gone = add_key(link, "gone", tenant="acme", scopes=READ)
    remove_key(link, "gone")

    keyring = read_keyring(path)
    assert keyring.identify(kept)
    assert keyring.identify(gone) is None
    assert "# by hand, no newline at the end\n" in path.read_text()
    assert mode_of(path) == 0o640
    assert link.is_symlink()


def test_a_name_is_taken_once(path):
    add_key(path, "engine", tenant="acme", scopes=READ)
    before = path.read_bytes()

    with pytest.raises(InvalidConfig, match="there is a key engine"):
        add_key(path, "engine", tenant="other", scopes=READ)

    assert path.read_bytes() == before


def test_a_key_that_is_not_there_cannot_be_removed(path):
    with pytest.raises(InvalidConfig, match="there is no key of this name"):
        remove_key(path, "engine")


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff\xfe", b"secret aa\n", b"#" * (1 << 20) + b"#"])
def test_a_file_that_is_no_keyring_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "keys"
    path.write_bytes(content)

    with pytest.raises(InvalidConfig, match=str(path)):
        add_key(path, "engine", tenant="acme", scopes=READ)

    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["", "a b", "a#b", "a\nkey x y admin z", "-a", "a" * 65, "é", "local"])
def test_a_malformed_name_changes_nothing(path, name):
    before = path.read_bytes()

    with pytest.raises(InvalidConfig, match="name: expected"):
        add_key(path, name, tenant="acme", scopes=READ)
    with pytest.raises(InvalidConfig, match="tenant: expected"):
        add_key(path, "a", tenant=name, scopes=READ)

    assert path.read_bytes() == before


def test_keys_added_at_once_are_all_kept(path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = list(
            pool.map(lambda number: add_key(path, f"k{number}", tenant="acme", scopes=READ), range(40))
        )

    keyring = read_keyring(path)
    assert len(keyring) == 40
    assert all(keyring.identify(key) for key in keys)


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot be made"):
        create_keyring(tmp_path / "absent" / "keys")
    with pytest.raises(InvalidConfig, match="cannot be changed"):
        add_key(tmp_path / "absent" / "keys", "a", tenant="acme", scopes=READ)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_keyring(tmp_path / "keys")


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(path):
    """Each child adds keys until it is killed; whatever it got done, the file is a keyring."""
    code = (
        "import sys; from pathlib import Path; from kvstore.auth import Scope;"
        "from kvstore.keyring_file import add_key\n"
        "for n in range(900):"
        " add_key(Path(sys.argv[1]), f'{sys.argv[2]}-{n}', tenant='t', scopes=frozenset(Scope));"
        " print(n, flush=True)"
    )
    for number in range(4):
        child = subprocess.Popen([sys.executable, "-c", code, path, f"c{number}"], stdout=subprocess.PIPE)
        for _ in range(number + 1):
            child.stdout.readline()
        child.kill()
        child.communicate()

    assert len(read_keyring(path)) >= 1 + 2 + 3 + 4


def test_the_commands_make_list_and_remove_keys(tmp_path, run):
    path = tmp_path / "keys"

    made = run("init", path)
    added = run("add", path, "engine", "--tenant", "acme")
    told = run("add", path, "ops", "--tenant", "house", "--scopes", "admin", "--json")
    listed = run("list", path, "--json")
    shown = run("list", path)
    removed = run("remove", path, "engine")

    assert (made[0], added[0], told[0], listed[0], removed[0]) == (0, 0, 0, 0, 0)
    key = added[1].strip()
    assert json.loads(listed[1]) == {
        "keys": [
            {"name": "engine", "tenant": "acme", "scopes": ["read", "write"]},
            {"name": "ops", "tenant": "house", "scopes": ["admin"]},
        ]
    }
    assert shown[1].splitlines()[0] == "engine  tenant acme  scopes read,write"
    keyring = read_keyring(path)
    assert keyring.identify(key) is None
    assert keyring.identify(json.loads(told[1])["key"]).scopes == {Scope.ADMIN}
    outputs = "".join(text for result in (made, listed, shown, removed) for text in result[1:])
    assert "kvs_" not in outputs
    assert path.read_text().split("secret ")[1][:64] not in outputs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["add", "FILE", "a", "--tenant", "t", "--scopes", "all"], "scopes: expected some of read, write"),
        (["add", "FILE", "a", "--tenant", "t", "--scopes", ""], "scopes: expected some of read, write"),
        (["add", "FILE", "a", "--tenant", "t/u"], "tenant: expected 1 to 64"),
        (["remove", "FILE", "a"], "there is no key of this name"),
        (["init", "FILE"], "exists"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(path, run, arguments, complaint):
    status, out, err = run(*[path if word == "FILE" else word for word in arguments])

    assert (status, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


def test_a_tenants_salt_is_written_to_a_file_of_its_own(tmp_path, path, run):
    add_key(path, "engine", tenant="acme", scopes=READ)
    out = tmp_path / "salt"

    made = run("salt", path, "acme", out)
    again = run("salt", path, "acme", out)

    assert (made[0], again[0]) == (0, 2)
    assert (out.read_bytes(), mode_of(out)) == (read_keyring(path).salt("acme"), 0o600)
    assert "exists: name a file that is not there" in again[2]
    assert read_keyring(path).salt("acme").hex() not in "".join((*made[1:], *again[1:]))


def test_a_salt_is_only_of_a_tenant_that_has_a_key(tmp_path, path, run):
    status, _, err = run("salt", path, "acne", tmp_path / "salt")

    assert status == 2
    assert "no key is of this tenant" in err
    assert not (tmp_path / "salt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_change_by_root_leaves_the_file_with_its_owner(path):
    os.chown(path, 12345, 23456)

    add_key(path, "engine", tenant="acme", scopes=READ)

    found = Path(path).stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 23456, 0o600)
