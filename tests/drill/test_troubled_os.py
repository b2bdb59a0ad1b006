"""The trouble in a store's process: it reaches what Python and LMDB do below one folder, and nothing else."""

import errno
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvstore.drill.disk_control import trouble_obstacle
from kvstore.drill.shared_library import SharedLibrary
from kvstore.drill.store_process import PartFailed

PROLOGUE = """
import errno, json, os, sys
from pathlib import Path
import lmdb
from kvstore.drill.lmdb_calls import LmdbCalls
from kvstore.drill.trouble import Trouble, TroubleOrder
from kvstore.drill.troubled_os import TroubledOs
FOLDER = Path(sys.argv[1])
trouble = Trouble(TroubleOrder())
LmdbCalls().lead_to_os()
TroubledOs(trouble, str(FOLDER)).install()
say = lambda **found: print(json.dumps(found))
def code_of(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0
"""


@pytest.fixture(autouse=True)
def _needs_trouble() -> None:
    reason = trouble_obstacle()
    if reason:
        pytest.skip(reason)


def troubled(folder: Path, script: str) -> dict[str, Any]:
    """Run a script in a process of its own, whose ``os`` is troubled; returns what it says."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_each_operation_of_python_is_counted_and_can_fail(tmp_path: Path) -> None:
    said = troubled(
        tmp_path,
        """
        fd = os.open(FOLDER / "file", os.O_RDWR | os.O_CREAT)
        calls = [
            lambda: os.pwritev(fd, [b"a"], 0), lambda: os.pwrite(fd, b"a", 0), lambda: os.write(fd, b"a"),
            lambda: os.writev(fd, [b"a"]), lambda: os.preadv(fd, [bytearray(1)], 0),
            lambda: os.pread(fd, 1, 0), lambda: os.fsync(fd), lambda: os.fdatasync(fd),
            lambda: os.ftruncate(fd, 9),
            lambda: os.posix_fallocate(fd, 0, 9), lambda: os.mkdir(FOLDER / "new"),
            lambda: os.rename(FOLDER / "file", FOLDER / "other"), lambda: os.unlink(FOLDER / "file"),
            lambda: os.open(FOLDER / "file", os.O_RDONLY), lambda: os.close(os.dup(fd)),
        ]
        codes, counts = [], []
        for call in calls:
            trouble.take(TroubleOrder(fail_at=1))
            codes.append(code_of(call))
            counts.append(trouble.status().num_operations)
        say(codes=codes, counts=counts, names=sorted(os.listdir(FOLDER)))
        """,
    )

    assert said == {"codes": [errno.EIO] * 15, "counts": [1] * 15, "names": ["file"]}


def test_other_folders_have_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    said = troubled(
        tmp_path / "a",
        """
        trouble.take(TroubleOrder(fail_at=1))
        fd = os.open(FOLDER.parent / "file", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, b"a", 0)
        os.fsync(fd)
        os.close(fd)
        say(count=trouble.status().num_operations)
        """,
    )

    assert said == {"count": 0}


def test_every_write_and_sync_of_lmdb_can_fail_and_is_made_up_for(tmp_path: Path) -> None:
    said = troubled(
        tmp_path,
        """
        environment = lmdb.open(str(FOLDER), map_size=1 << 20)
        def put(value):
            try:
                with environment.begin(write=True) as transaction:
                    transaction.put(b"k", value)
            except lmdb.Error as error:
                return "Input/output error" in str(error)
            return False
        put(b"0")
        failed, number = [], 1
        while True:
            trouble.take(TroubleOrder(fail_at=number))
            has_failed = put(b"%d" % number)
            if not trouble.take(TroubleOrder()).num_harmed:
                break
            failed.append(has_failed)
            number += 1
            environment.close()
            environment = lmdb.open(str(FOLDER), map_size=1 << 20)
        with environment.begin() as transaction:
            say(failed=failed, value=transaction.get(b"k").decode(), number=number)
        """,
    )

    assert said["failed"] == [True] * (said["number"] - 1)
    assert said["number"] > 3
    assert said["value"] == str(said["number"])


def test_what_lmdb_and_python_write_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    said = troubled(
        tmp_path / "a",
        """
        from kvstore.drill.write_log import read_log
        environment = lmdb.open(str(FOLDER), map_size=1 << 20)
        fd = os.open(FOLDER / "file", os.O_RDWR | os.O_CREAT)
        log = FOLDER.parent / "log"
        trouble.take(TroubleOrder(log_path=str(log)))
        os.pwritev(fd, [b"abc"], 5)
        os.fdatasync(fd)
        with environment.begin(write=True) as transaction:
            transaction.put(b"k", b"marker")
        records = read_log(log)
        file = [record for record in records if record.name == "file"]
        index = [record for record in records if record.name == "data.mdb"]
        say(
            file=[(record.is_sync, record.offset, record.data.decode()) for record in file],
            covered=file[1].num_covered, has_marker=any(b"marker" in record.data for record in index),
            has_sync=any(record.is_sync for record in index), ends_durable=index[-1].is_durable,
        )
        """,
    )

    assert said == {
        "file": [[False, 5, "abc"], [True, 0, ""]],
        "covered": 1,
        "has_marker": True,
        "has_sync": True,
        "ends_durable": True,
    }


def test_a_write_is_torn_or_cut_short_at_its_half(tmp_path: Path) -> None:
    said = troubled(
        tmp_path,
        """
        fd = os.open(FOLDER / "file", os.O_RDWR | os.O_CREAT)
        trouble.take(TroubleOrder(fail_at=1, harm="shorten"))
        done = os.pwritev(fd, [b"ab", b"cdef"], 0)
        trouble.take(TroubleOrder(fail_at=1, harm="tear", error=errno.ENOSPC))
        code = code_of(lambda: os.pwrite(fd, b"12345678", 10))
        say(done=done, code=code, content=os.pread(fd, 100, 0).decode())
        """,
    )

    assert said == {"done": 3, "code": errno.ENOSPC, "content": "abc\0\0\0\0\0\0\0" + "1234"}


def test_a_file_that_is_no_loaded_library_has_no_calls_to_lead(tmp_path: Path) -> None:
    with pytest.raises(PartFailed, match="is not loaded"):
        SharedLibrary(tmp_path / "none.so")
