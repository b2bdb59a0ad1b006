"""A number too large for a float is a bad line, and no traceback."""

import pytest

from kvstore.errors import InvalidTrace
from kvstore.replay import read_trace


@pytest.mark.parametrize("digits", [19, 400])
def test_an_instant_of_hundreds_of_digits_is_a_bad_line(tmp_path, digits):
    path = tmp_path / "trace.jsonl"
    log = '{"kvstore_access_log":1,"session":"a"}\n{"t":%s,"n":16,"blocks":["b"]}\n'
    path.write_text(log % ("9" * digits))
    with pytest.raises(InvalidTrace, match="line 2: t is 9999"):
        read_trace(str(path))
