"""The digest of a model's files: every byte counts, and what is remembered is never another file's."""

import hashlib
import json
import logging
import os
import random
from itertools import count

import pytest

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter import model_digest
from kvstore_engine_adapter.model_digest import ModelFiles


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose bytes were read."""
    names = []
    hash_file = ModelFiles._hash

    def note(files, identity):
        names.append(identity.path.rsplit("/", 1)[-1])
        return hash_file(files, identity)

    monkeypatch.setattr(ModelFiles, "_hash", note)
    return names


def much_later():
    """A wall clock by which every file was changed long ago."""
    return 1 << 62


def digest(*paths, cache=None, wall_clock_ns=much_later):
    return ModelFiles(paths, cache_folder=cache, wall_clock_ns=wall_clock_ns).digest()


def write(path, data):
    path.write_bytes(data)
    return path


def test_the_digest_of_one_file_is_its_sha256_whatever_its_size(tmp_path):
    data = random.Random(1).randbytes((9 << 20) + 5)
    assert digest(write(tmp_path / "m", data)) == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_finetunes_that_differ_between_any_samples_never_share_a_digest(tmp_path):
    sparse = tmp_path / "m.safetensors"
    with sparse.open("wb") as file:
        file.truncate(200 << 20)
    before = digest(sparse)
    with sparse.open("r+b") as file:
        file.seek((101 << 20) + (1 << 19))
        file.write(b"x")
    assert digest(sparse) != before


def test_several_files_count_with_their_names_and_borders(tmp_path):
    one, other = write(tmp_path / "a", b"12"), write(tmp_path / "b", b"3")
    whole = digest(one, other)
    assert whole != digest(write(tmp_path / "a", b"1"), write(tmp_path / "b", b"23"))
    assert whole != digest(write(tmp_path / "c", b"12"), other)


def test_the_next_start_reads_no_byte(tmp_path, cache, hashed):
    paths = [write(tmp_path / "a", b"1"), write(tmp_path / "b", b"2")]
    first = digest(*paths, cache=cache)
    assert hashed == ["a", "b"]

    assert digest(*paths, cache=cache) == first
    assert hashed == ["a", "b"]


@pytest.mark.parametrize("how", ["in place, times set back", "replaced", "longer"])
def test_a_file_that_changed_is_hashed_again(tmp_path, cache, how):
    path = write(tmp_path / "m", b"old!")
    times = path.stat()
    digest(path, cache=cache)

    if how == "replaced":
        write(tmp_path / "new", b"new!").replace(path)
    else:
        write(path, b"new!" if how.startswith("in place") else b"longer")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert digest(path, cache=cache) == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path, cache, hashed):
    path = write(tmp_path / "m", b"1")
    now_ns = path.stat().st_ctime_ns + 10**9
    for _ in range(2):
        digest(path, cache=cache, wall_clock_ns=lambda: now_ns)
    assert hashed == ["m", "m"]


def test_a_record_that_is_damaged_or_anothers_is_not_believed(tmp_path, cache, hashed):
    path = write(tmp_path / "m", b"1")
    right = digest(path, cache=cache)
    (record,) = (cache / "digests").iterdir()
    whole = record.read_bytes()
    head, _, body = whole.partition(b"\n")
    forged = json.dumps([*json.loads(body)[:-1], "0" * 64]).encode()

    for data in (b"", whole[:-3], whole[:-10] + b"0" + whole[-9:], head + b"\n" + forged, b"\xff" * 40):
        record.write_bytes(data)
        assert digest(path, cache=cache) == right
    record.write_bytes(whole)
    record.chmod(0o666)
    assert digest(path, cache=cache) == right
    assert len(hashed) == 7


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path):
    path = write(tmp_path / "m", b"1")
    blocked = write(tmp_path / "cache", b"a file where the folder should be")
    assert digest(path, cache=blocked) == digest(path)


def test_nothing_unfinished_stays_in_the_cache(tmp_path, cache):
    digest(write(tmp_path / "m", b"1"), cache=cache)
    (record,) = (cache / "digests").iterdir()
    assert record.stat().st_mode & 0o777 == 0o600


def test_a_model_that_changes_while_it_is_loaded_is_refused(tmp_path):
    path = write(tmp_path / "m", b"1")
    files = ModelFiles([path])
    write(tmp_path / "new", b"2").replace(path)
    with pytest.raises(UnsupportedModel, match="changed while it was loaded"):
        files.digest()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UnsupportedModel, match="none"):
        ModelFiles([tmp_path / "none"])


def test_long_hashing_tells_its_progress(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(model_digest, "_CHUNK_BYTES", 1000)
    path = write(tmp_path / "m", bytes(10_000))
    ticks = count()
    with caplog.at_level(logging.INFO, logger=model_digest.__name__):
        ModelFiles([path], clock=lambda: float(next(ticks))).digest()
    assert len(caplog.records) == 2
    assert "of 0.0 GB" in caplog.text
