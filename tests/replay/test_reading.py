"""Traces are read in each format, and a bad line says what, where, and what to do."""

import gzip
import json

import numpy as np
import pytest

from kvstore.errors import InvalidTrace
from kvstore.replay import lines as lines_module
from kvstore.replay import read_trace
from tests.replay.traces import CHAT, mooncake_line, write_mooncake


def write_lines(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return str(path)


def chains(trace):
    return [list(chain) for chain in trace.chains()]


def test_mooncake_lines_are_requests(tmp_path):
    trace = read_trace(str(write_mooncake(tmp_path / "trace.jsonl", tail_tokens=100)))

    assert (trace.format, trace.block_tokens, trace.requests) == ("mooncake", 512, len(CHAT))
    assert chains(trace)[:2] == [[0, 1, 2], [0, 1, 3]]
    assert trace.arrival_s.tolist() == [0, 1, 2, 3, 4]
    assert trace.input_tokens[0] == 2 * 512 + 100
    assert (trace.block_accesses, trace.unique_blocks) == (17, 9)


def test_bailian_lines_have_seconds_and_sixteen_tokens(tmp_path):
    request = {
        "chat_id": 7,
        "parent_chat_id": -1,
        "timestamp": 61.5,
        "input_length": 33,
        "output_length": 2,
        "type": "text",
        "turn": 1,
        "hash_ids": [10, 11, 12],
    }

    trace = read_trace(write_lines(tmp_path / "trace.jsonl", request))

    assert (trace.format, trace.block_tokens) == ("bailian", 16)
    assert (trace.arrival_s[0], trace.input_tokens[0], trace.output_tokens[0]) == (61.5, 33, 2)


def test_the_same_id_under_another_parent_is_another_block(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{mooncake_line([1, 9])}\n{mooncake_line([2, 9])}\n{mooncake_line([9, 9])}\n")

    assert chains(read_trace(str(path))) == [[0, 1], [2, 3], [4, 5]]


def test_an_access_log_says_its_block_size_and_names_blocks_by_text(tmp_path):
    path = write_lines(
        tmp_path / "access.jsonl",
        {"kvstore_access_log": 1, "session": "x"},
        {"t": 1.5, "n": 32, "blocks": ["ab", "cd"]},
        {"t": 2.5, "n": 32, "blocks": ["ab"]},
        {"kvstore_access_log": 1, "session": "x"},
        {"t": 3.5, "n": 32, "blocks": ["ab"]},
    )

    trace = read_trace(path)

    assert (trace.format, trace.block_tokens, trace.requests) == ("access-log", 32, 3)
    assert chains(trace)[1] == [0]


def test_a_trace_may_be_compressed(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(mooncake_line([1, 2]).encode()))

    assert read_trace(str(path)).requests == 1


def test_reading_stops_at_the_number_of_requests_asked_for(tmp_path):
    assert read_trace(str(write_mooncake(tmp_path / "trace.jsonl")), max_requests=2).requests == 2


def test_requests_out_of_order_are_taken_in_file_order_and_told(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{mooncake_line([1], at_ms=5000)}\n{mooncake_line([2], at_ms=3000)}\n")

    trace = read_trace(str(path))

    assert trace.arrival_s.tolist() == [5, 5]
    assert "1 requests arrive before" in trace.notes[0]


def test_full_blocks_only_leaves_out_partly_filled_ones(tmp_path):
    trace = read_trace(str(write_mooncake(tmp_path / "trace.jsonl", tail_tokens=100)))

    full = trace.full_blocks_only()

    assert np.diff(full.starts).tolist() == [2, 2, 4, 1, 3]
    assert full.block_accesses == trace.block_accesses


GOOD = mooncake_line([1, 2])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("7", "is no JSON object"),
        ('{"timestamp": 0}', "has no hash_ids, expected a list"),
        ('{"hash_ids": 3}', "hash_ids is 3, expected a list"),
        ('{"hash_ids": [1, 2.5]}', "hash_ids[1] is 2.5, expected a whole number"),
        ('{"hash_ids": [true]}', "hash_ids[0] is true"),
        ('{"hash_ids": [1]}', "has no input_length"),
        ('{"hash_ids": [1], "input_length": -3}', "input_length is -3"),
        ('{"hash_ids": [1], "input_length": 3, "timestamp": NaN}', "timestamp is NaN, expected a number"),
        (
            '{"hash_ids": [1], "input_length": 3, "timestamp": 1, "output_length": "x"}',
            'output_length is "x"',
        ),
        ('{"hash_ids": [1, 2], "input_length": 32, "timestamp": 1}', "blocks of 16 to 31 tokens would"),
        ('{"hash_ids": [1], "input_length": 4000, "timestamp": 1}', "give --block-tokens"),
    ],
)
def test_a_bad_line_says_what_and_where(tmp_path, bad, said):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n")

    with pytest.raises(InvalidTrace) as caught:
        read_trace(str(path))

    assert f"{path}: line 3: " in str(caught.value)
    assert said in str(caught.value)
    assert "--skip-bad-lines" in str(caught.value)


def test_bad_lines_are_skipped_and_counted_on_demand(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\nnonsense\n[]\n{GOOD}\n")

    trace = read_trace(str(path), skip_bad_lines=True)

    assert trace.requests == 2
    assert trace.notes == ("2 bad lines skipped",)


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "trace.jsonl"
    path.write_text("[" + "1," * 1000)

    with pytest.raises(InvalidTrace, match="line 1: is longer than 1000 bytes"):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"a": 1}\n', "looks like none of the formats mooncake, bailian, vllm, access-log: give --format"),
        ('{"kvstore_access_log": 2}\n', "kvstore_access_log is 2, expected 1"),
        ('{"kvstore_access_log": 1}\n{"t": 1, "n": 0, "blocks": []}', "n is 0, expected the tokens"),
        ('{"kvstore_access_log": 1}\n{"t": 1, "blocks": []}', "has no n, expected a whole number"),
        ('{"kvstore_access_log": 1}\n', "no request in it, read as access-log"),
    ],
)
def test_a_file_that_is_no_trace_says_so(tmp_path, text, said):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(InvalidTrace, match=said):
        read_trace(str(path))


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    broken = tmp_path / "trace.jsonl.gz"
    broken.write_bytes(b"no gzip")

    with pytest.raises(InvalidTrace, match="cannot be read: Not a gzipped file"):
        read_trace(str(broken))
    with pytest.raises(InvalidTrace, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "absent"))


def test_each_session_of_a_store_goes_on_where_the_one_before_ended(tmp_path):
    head, other = ({"kvstore_access_log": 1, "session": name} for name in "xy")
    lines = [{"t": at, "n": 16, "blocks": ["ab"]} for at in (5, 9, 2)]

    trace = read_trace(write_lines(tmp_path / "log.jsonl", head, lines[0], head, lines[1], other, lines[2]))

    assert trace.arrival_s.tolist() == [5, 9, 11]


def test_requests_with_blocks_of_another_size_are_left_out_and_told(tmp_path):
    lines = [{"t": 1, "n": size, "blocks": ["ab"]} for size in (16, 32, 16)]

    trace = read_trace(write_lines(tmp_path / "log.jsonl", {"kvstore_access_log": 1}, *lines))

    assert (trace.requests, trace.block_tokens) == (2, 16)
    assert trace.notes == ("1 requests left out: their blocks have not 16 tokens",)


def stored(hashes, parent=None, **fields):
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "block_size": 16,
    } | fields


def test_stored_blocks_are_requests_with_all_their_ancestors(tmp_path):
    path = write_lines(
        tmp_path / "events.jsonl",
        [100.0, [stored([1, 2])], 0],
        {
            "ts": 110.0,
            "events": [stored([3], 2, medium="GPU"), {"type": "BlockRemoved", "block_hashes": [1]}],
        },
        [120.0, [["BlockStored", [4], 1, [], 16, None, "GPU"]], 0],
    )

    trace = read_trace(path)

    assert (trace.format, trace.block_tokens) == ("vllm", 16)
    assert chains(trace) == [[0, 1], [0, 1, 2], [0, 3]]
    assert trace.arrival_s.tolist() == [100, 110, 120]


def test_events_that_go_on_at_once_are_one_request(tmp_path):
    path = write_lines(
        tmp_path / "events.jsonl",
        {"timestamp": 1.0, **stored(["a", "b"])},
        {"timestamp": 2.0, **stored(["x"])},
        {"timestamp": 3.0, **stored(["c"], "b")},
        {"timestamp": 30.0, **stored(["d"], "c")},
    )

    assert chains(read_trace(path)) == [[0, 1, 2], [3], [0, 1, 2, 4]]


def test_what_events_cannot_tell_is_noted(tmp_path):
    path = write_lines(
        tmp_path / "events.jsonl",
        [1.0, [{"type": "AllBlocksCleared"}]],
        [1.0, [stored([5], 4), stored([5], 4, medium="CPU"), stored([5], 4, group_idx=1), stored([])]],
    )

    notes = " ".join(read_trace(path).notes)

    assert "2 events of other media" in notes
    assert "1 events go on from a block never seen" in notes


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (stored([2], block_size=32), "block_size is 32, expected 16 as before"),
        (stored([2], block_size="x"), "block_size is x"),
        (stored([2], [1]), "parent_block_hash is neither"),
        (stored(None), "block_hashes is null"),
        ({"kind": 1}, "an event has no type"),
    ],
)
def test_a_bad_event_says_what_and_where(tmp_path, event, said):
    path = write_lines(tmp_path / "events.jsonl", [1.0, [stored([1])]], [2.0, [event]])

    with pytest.raises(InvalidTrace, match="line 2: ") as caught:
        read_trace(path)

    assert said in str(caught.value)


@pytest.mark.parametrize("line", [7, {"ts": 1, "events": 3}, [1], {"events": []}])
def test_a_line_that_is_no_batch_says_so(tmp_path, line):
    path = write_lines(tmp_path / "events.jsonl", [1.0, [stored([1])]], line)

    with pytest.raises(InvalidTrace, match="line 2: "):
        read_trace(path)
