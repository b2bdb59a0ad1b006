"""SsdFolder and forks: a child of a process that had the folder does not keep it locked."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore_tiers.ssd_folder import SsdFolder

HOST = """
import os, sys
from pathlib import Path
from kvstore_tiers.ssd_folder import SsdFolder
folder = SsdFolder(Path(sys.argv[1]), name="ssd")
folder.acquire()
if not os.fork():
    print("forked", flush=True)
os.read(0, 1)
os._exit(0)
"""


def test_a_folder_is_free_when_its_owner_was_killed_and_a_forked_child_lives(tmp_path: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOST), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"forked\n"
        host.kill()
        host.wait()
        again = SsdFolder(tmp_path, name="ssd")
        again.acquire()
        again.release()


def test_a_folder_is_free_when_it_was_released_and_a_forked_child_lives(tmp_path: Path) -> None:
    folder = SsdFolder(tmp_path, name="ssd")
    folder.acquire()
    hears, tells = os.pipe()
    child = os.fork()
    if not child:
        os.close(tells)
        os.read(hears, 1)
        os._exit(0)
    os.close(hears)
    folder.release()

    again = SsdFolder(tmp_path, name="ssd")
    again.acquire()

    again.release()
    os.close(tells)
    os.waitpid(child, 0)


def test_a_forked_child_that_releases_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    folder = SsdFolder(tmp_path, name="ssd")
    folder.acquire()
    child = os.fork()
    if not child:
        folder.release()
        os._exit(0)
    os.waitpid(child, 0)

    with pytest.raises(TierUnavailable, match="in use by process"):
        SsdFolder(tmp_path, name="ssd").acquire()

    assert folder.is_present()
    folder.release()
