"""KeyFile: replaced as a whole, and nothing of what was taken out stays in a file."""

import os
from pathlib import Path

import pytest

from kvstore.key_file import KeyFile

ONE, OTHER = b"1" * 32, b"2" * 32


def key_file(*folders: Path) -> KeyFile:
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return KeyFile(folders, record_bytes=32, in_use=lambda: folders)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    assert file.read() == ([], [])
    assert file.write([ONE, OTHER]) == []
    assert file.read() == ([ONE, OTHER], [])
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_a_replaced_file_is_overwritten_before_its_name_goes(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    file.write([ONE])
    with (tmp_path / "keys").open("rb") as held:
        file.write([OTHER])
        assert ONE not in held.read()
        assert held.seek(0) == 0
        assert not any(held.read())
    assert file.read() == ([OTHER], [])


@pytest.mark.parametrize("left", ["keys.new", "keys.old"])
def test_what_an_interrupted_replacement_left_is_overwritten_at_the_next_start(
    tmp_path: Path, left: str
) -> None:
    file = key_file(tmp_path)
    file.write([ONE])
    (tmp_path / left).write_bytes(OTHER)
    with (tmp_path / left).open("rb") as held:
        assert file.read() == ([ONE], [])
        assert not any(held.read())
    assert not (tmp_path / left).exists()


def test_a_crash_between_link_and_rename_does_not_cost_the_file(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    file.write([ONE])
    os.link(tmp_path / "keys", tmp_path / "keys.old")
    assert file.read() == ([ONE], [])
    assert file.write([OTHER]) == []
    assert file.read() == ([OTHER], [])


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "magic"])
def test_a_damaged_file_is_named_and_yields_nothing(tmp_path: Path, damage: str) -> None:
    file = key_file(tmp_path)
    file.write([ONE])
    data = bytearray((tmp_path / "keys").read_bytes())
    data[20] ^= 1
    made = {"flip": data, "cut": data[:-9], "empty": b"", "magic": b"x" * len(data)}
    (tmp_path / "keys").write_bytes(made[damage])
    records, problems = file.read()
    assert records == []
    assert problems == [f"{tmp_path / 'keys'}: is damaged: its checksum does not match"]


def test_of_two_files_the_sound_one_counts_and_both_are_written(tmp_path: Path) -> None:
    file = key_file(tmp_path / "a", tmp_path / "b")
    file.write([ONE])
    (tmp_path / "a" / "keys").write_bytes(b"x")
    records, problems = file.read()
    assert (records, len(problems)) == ([ONE], 1)
    assert file.write([ONE]) == []
    assert file.read() == ([ONE], [])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folders = [tmp_path / "absent", tmp_path]
    file = KeyFile(folders, record_bytes=32, in_use=lambda: folders)
    (problem,) = file.write([ONE])
    assert problem.startswith(f"{tmp_path / 'absent' / 'keys'}: cannot be written: No such file")
    assert file.read() == ([ONE], [])


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "keys.old").symlink_to(tmp_path / "victim")
    assert file.write([ONE]) != []
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_file_in_a_folder_that_is_not_ours_is_neither_read_nor_written(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "a", tmp_path / "b"
    key_file(theirs).write([ONE])
    in_use = [ours]
    key_file(ours)
    file = KeyFile([theirs, ours], record_bytes=32, in_use=lambda: in_use)

    assert file.read() == ([], [])
    assert file.write([OTHER]) == [f"{theirs / 'keys'}: its folder is not in use by this store now"]
    assert not file.has_come()

    assert key_file(theirs).read() == ([ONE], [])
    in_use.append(theirs)
    assert file.has_come()
    assert file.read() == ([ONE, OTHER], [])
    assert not file.has_come()


def test_what_holds_the_same_is_not_written_again(tmp_path: Path) -> None:
    folders = [tmp_path / "absent", tmp_path]
    file = KeyFile(folders, record_bytes=32, in_use=lambda: folders)
    assert len(file.write([ONE])) == 1
    before = (tmp_path / "keys").stat()
    (tmp_path / "absent").mkdir()
    assert file.write([ONE]) == []
    assert (tmp_path / "keys").stat().st_ino == before.st_ino
    assert (tmp_path / "absent" / "keys").read_bytes() == (tmp_path / "keys").read_bytes()
    assert file.write([OTHER]) == []
    assert (tmp_path / "keys").stat().st_ino != before.st_ino
