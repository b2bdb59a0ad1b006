"""The access log has each request once, under names that tell nothing, and is never in the way."""

import json
import math
import os

import pytest

from kvstore import KVLayout, Namespace
from kvstore import access_log as access_log_module
from kvstore.access_log import MIN_MAX_BYTES, Access, AccessLog
from kvstore.errors import InvalidConfig, InvalidTrace
from kvstore.layout import Part
from kvstore.replay import read_trace

LAYOUT = KVLayout.opaque(block_bytes=64, block_tokens=4)
NAMESPACE = Namespace(model="m", layout=LAYOUT)
OTHER = Namespace(model="other", layout=KVLayout.opaque(block_bytes=64, block_tokens=8))


def chain(*first_tokens, namespace=NAMESPACE):
    """A chain with a block for each number."""
    return namespace.chain([token for token in first_tokens for _ in range(namespace.block_tokens)])


class Log:
    """A log with a clock of its own, that is read when it has ended."""

    def __init__(self, path, **settings):
        self.path, self.now_s = path, 50.0
        self.log = AccessLog(path, clock=lambda: self.now_s, **settings)
        self.log.start()

    def note(self, access, what, client=1, part=None):
        self.log.note(client, access, what, part)
        self.now_s += 1

    def requests(self):
        self.log.close()
        trace = read_trace(str(self.path))
        return [list(blocks) for blocks in trace.chains()]

    def lines(self):
        self.log.close()
        return [json.loads(line) for line in self.path.read_text().splitlines() if line]


@pytest.fixture
def log(tmp_path):
    made = Log(tmp_path / "access.jsonl")
    yield made
    made.log.close()


def test_what_one_client_does_with_a_chain_is_one_request(log):
    prompt, whole = chain(1, 2, 3), chain(1, 2, 3, 4)
    log.note(Access.LOOK, prompt)
    log.note(Access.PEEK, prompt[:2])
    log.note(Access.TAKE, prompt[:2])
    log.note(Access.STORE, whole[2:])

    assert log.requests() == [[0, 1, 2, 3]]


def test_windows_of_a_long_chain_are_one_request(log):
    prompt = chain(*range(10))
    for access in (Access.TAKE, Access.STORE):
        for start in (0, 4, 8):
            log.note(access, prompt[start : start + 4])

    assert log.requests() == [list(range(10))]


def test_asking_again_is_another_request(log):
    for access in (Access.LOOK, Access.LOOK, Access.TAKE, Access.TAKE, Access.TAKE):
        log.note(access, chain(1, 2))

    assert log.requests() == [[0, 1], [0, 1], [0, 1]]


def test_clients_and_chains_are_kept_apart(log):
    log.note(Access.LOOK, chain(1, 2))
    log.note(Access.LOOK, chain(1, 3))
    log.note(Access.TAKE, chain(1, 2), client=2)
    log.note(Access.STORE, chain(1, 3, 4))

    assert log.requests() == [[0, 1], [0, 2, 3], [0, 1]]


def test_a_request_that_was_silent_for_long_has_ended(log):
    log.note(Access.LOOK, chain(1))
    log.now_s += 60
    log.note(Access.STORE, chain(1))

    assert log.requests() == [[0], [0]]


def test_requests_that_have_ended_are_not_kept_while_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log_module, "_POLL_S", 60.0)
    log = Log(tmp_path / "access.jsonl")

    for client in range(100):
        log.note(Access.LOOK, chain(1, 2), client=client)
        log.log._work()

    assert len(log.log._by_client) <= 11  # a client a second, and a request ends after 10 s
    assert len(log.requests()) == 100


def test_of_the_parts_of_a_block_the_first_counts(log):
    for start in (0, 4):
        log.note(Access.LOOK, chain(1), client=start, part=Part(0, 8, start, start + 4))

    assert log.requests() == [[0]]


def test_a_chain_whose_beginning_was_not_seen_is_counted_as_dropped(log):
    log.note(Access.TAKE, chain(1, 2)[1:])
    log.note(Access.TAKE, chain())
    log.note(Access.LOOK, chain(5))

    assert log.requests() == [[0]]
    assert log.log.as_dict() == {"lines": 1, "dropped": 1, "unwritten": 0}


def test_nothing_in_the_file_is_a_key_and_nothing_is_the_same_in_two_files(tmp_path):
    first, second = Log(tmp_path / "a"), Log(tmp_path / "b")
    for one in (first, second):
        one.note(Access.LOOK, chain(1, 2))
    keys = [key.hex() for key in chain(1, 2).keys]

    names = [one.lines()[-1]["blocks"] for one in (first, second)]

    text = first.path.read_text() + second.path.read_text()
    assert not any(key[start : start + 16] in text for key in keys for start in (0, 16, 32, 48))
    assert set(names[0]).isdisjoint(names[1])
    assert first.path.stat().st_mode & 0o777 == 0o600


def test_blocks_of_two_sizes_say_so(log):
    log.note(Access.LOOK, chain(1))
    log.note(Access.LOOK, chain(1, namespace=OTHER))

    assert [line["n"] for line in log.lines()[1:]] == [4, 8]


def test_the_files_together_stay_below_their_size(tmp_path):
    log = Log(tmp_path / "access.jsonl", max_bytes=MIN_MAX_BYTES)
    for number in range(100):
        log.note(Access.LOOK, chain(*range(number, number + 100)))

    log.log.close()

    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) <= MIN_MAX_BYTES + 4096
    assert read_trace(str(log.path)).requests < 100


def test_nothing_is_kept_of_clients_whose_requests_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log_module, "_MAX_OPEN_REQUESTS", 5)
    log = Log(tmp_path / "access.jsonl")
    for client in range(100):
        log.note(Access.LOOK, chain(client), client=client)
    log.log.close()

    assert len(log.lines()) == 101
    assert not log.log._by_client


def test_a_request_that_never_ends_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log_module, "_MAX_REQUEST_KEYS", 3)
    log = Log(tmp_path / "access.jsonl")
    whole = chain(*range(8))
    for number in range(8):
        log.note(Access.STORE, whole[number : number + 1])

    assert log.requests() == [[0, 1, 2, 3]]
    assert log.log.as_dict() == {"lines": 1, "dropped": 4, "unwritten": 0}


def test_a_file_that_is_there_is_gone_on_with(tmp_path):
    for _ in range(2):
        log = Log(tmp_path / "access.jsonl")
        log.note(Access.LOOK, chain(1, 2))
        log.log.close()
        with log.path.open("a") as file:
            file.write('{"t":1')

    trace = read_trace(str(log.path), skip_bad_lines=True)
    assert trace.requests == 2
    assert trace.unique_blocks == 4  # the names of another process


def test_what_comes_too_fast_is_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log_module, "_MAX_QUEUED_KEYS", 10)
    monkeypatch.setattr(access_log_module, "_POLL_S", 60.0)
    log = Log(tmp_path / "access.jsonl")
    for _ in range(5):
        log.note(Access.LOOK, chain(*range(6)))

    assert len(log.requests()) == 2
    assert log.log.as_dict() == {"lines": 2, "dropped": 3, "unwritten": 0}


def test_a_full_disk_stops_the_start():
    with pytest.raises(InvalidConfig, match="No space left"):
        AccessLog("/dev/full").start()


class Disk:
    """A disk that is full after so many more bytes, as long as it is small."""

    def __init__(self, monkeypatch):
        self.left_bytes = None
        self._write = os.write
        monkeypatch.setattr(access_log_module.os, "write", self.write)

    def write(self, fd, data):
        if self.left_bytes is None:
            return self._write(fd, data)
        if not self.left_bytes:
            raise OSError(28, "No space left on device")
        written = self._write(fd, data[: self.left_bytes])
        self.left_bytes -= written
        return written


def written(log, *first_tokens):
    """Have a request written at once, or lost."""
    log.note(Access.LOOK, chain(*first_tokens))
    log.log._work()
    log.log._end_requests(math.inf)


def test_a_log_goes_on_when_a_full_disk_has_room_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access_log_module, "_POLL_S", 3600.0)
    log, disk = Log(tmp_path / "access.jsonl"), Disk(monkeypatch)
    written(log, 1, 2)
    disk.left_bytes = 15
    for number in range(4):
        written(log, 10 + number)
    disk.left_bytes = None
    log.now_s += 10
    written(log, 1, 2, 3)

    assert log.requests() == [[0, 1], [0, 1, 2]]
    assert log.log.as_dict() == {"lines": 2, "dropped": 0, "unwritten": 4}
    assert caplog.text.count("No space left on device: requests are lost until it can be written") == 1
    assert caplog.text.count("goes on; 4 requests were lost") == 1
    assert read_trace(str(log.path)).notes == ("1 torn lines skipped",)


def test_a_log_goes_on_when_its_next_file_cannot_be_made_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log_module, "_POLL_S", 3600.0)
    log = Log(tmp_path / "access.jsonl", max_bytes=MIN_MAX_BYTES)
    (tmp_path / "access.jsonl.1").mkdir()
    for number in range(3):
        log.now_s += 10
        written(log, *range(number, number + 2000))
    assert log.path.stat().st_size < MIN_MAX_BYTES
    (tmp_path / "access.jsonl.1").rmdir()
    log.now_s += 10
    written(log, 5, 6)

    assert log.requests() == [[0, 1]]
    assert log.log.as_dict()["unwritten"] + log.log.as_dict()["lines"] == 4
    assert list(read_trace(str(tmp_path / "access.jsonl.1")).chains())


def test_a_log_goes_on_when_its_next_file_cannot_be_opened_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log_module, "_POLL_S", 3600.0)
    log = Log(tmp_path / "access.jsonl", max_bytes=MIN_MAX_BYTES)
    written(log, *range(2000))
    open_file, is_full = os.open, [True]

    def open_if_there_is_room(*args, **more):
        if is_full[0]:
            raise OSError(28, "No space left on device")
        return open_file(*args, **more)

    monkeypatch.setattr(os, "open", open_if_there_is_room)
    for _ in range(2):
        log.now_s += 10
        written(log, 1, 2)
    is_full[0] = False
    log.now_s += 10
    written(log, 5, 6, 7)

    assert log.requests() == [[0, 1, 2]]
    assert log.log.as_dict() == {"lines": 2, "dropped": 0, "unwritten": 2}


def test_a_log_whose_first_line_is_torn_is_read(tmp_path):
    path = tmp_path / "access.jsonl"
    path.write_text('{"kvstore_acc')
    log = Log(path)
    log.note(Access.LOOK, chain(1, 2))
    assert log.requests() == [[0, 1]]


def test_a_file_that_is_no_log_is_not_taken_for_a_torn_one(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"torn\n{"timestamp": 0, "hash_ids": [1]}\n')
    with pytest.raises(InvalidTrace, match="line 1: is no JSON"):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("path", "max_bytes", "said"),
    [("no/such/folder", MIN_MAX_BYTES, "No such file"), ("access", 10, "10 bytes, at least 65536")],
)
def test_a_log_that_cannot_be_written_stops_the_start(tmp_path, path, max_bytes, said):
    with pytest.raises(InvalidConfig, match=said):
        AccessLog(tmp_path / path, max_bytes=max_bytes).start()
