"""ChildPart: what ends with it, and what lives on."""

from pathlib import Path

import pytest

from kvstore.drill.child_part import ChildPart
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import PartFailed, wait_until


def processes_of_group(group: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def test_a_process_that_says_nothing_of_what_it_should_is_told_apart(tmp_path: Path) -> None:
    with (
        ChildPart("crowd_process", {"members": "none"}, log=tmp_path / "log") as part,
        pytest.raises(PartFailed, match="crowd_process: said None, expected ready"),
    ):
        part.hear("ready")


def test_killing_the_leader_leaves_what_it_forked_and_killing_all_does_not(
    tmp_path: Path, stage: Stage
) -> None:
    chain = stage.new_chain(2)
    stage.put(chain)
    order = {
        "socket": str(stage.store.socket_path),
        "namespace": stage.namespace.model,
        "block_bytes": stage.block_bytes,
        "members": [("lease", [key.hex() for key in chain.keys])] * 3,
    }
    part = ChildPart("crowd_process", order, log=tmp_path / "log")
    with part:
        part.hear("ready")
        group = part.pid
        part.kill()
        assert len(processes_of_group(group)) == 3
        assert stage.stats()["live_leases"] == 3

    assert wait_until(lambda: not processes_of_group(group), 10.0)
    assert wait_until(lambda: stage.stats()["live_leases"] == 0, 10.0)
