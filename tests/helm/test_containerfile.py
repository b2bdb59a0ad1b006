"""The Containerfile, read instruction by instruction: what ends up in the image, and as whom it runs."""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.helm.chart import chart, pod_specs, render, store_container

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Containerfile"
if not FILE.exists():
    pytest.skip("the Containerfile is not beside the tests", allow_module_level=True)


def instructions():
    """Return (instruction, rest) in order, continued lines joined, comments left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages():
    """Return the instructions of each stage, its FROM first."""
    found = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


@pytest.fixture(scope="module")
def project():
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_every_stage_stands_on_the_base_image_that_is_given():
    assert [stage[0][1].split()[0] for stage in stages()] == ["${BASE_IMAGE}"] * 2
    (base,) = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("BASE_IMAGE=")]
    assert not base.endswith((":latest", "="))
    assert ":" in base


def test_the_image_gets_nothing_but_the_installed_environment():
    copies = [shlex.split(rest) for name, rest in stages()[-1] if name in {"COPY", "ADD"}]

    assert copies == [["--from=build", "/opt/kvstore", "/opt/kvstore"]]


def test_what_the_build_copies_is_there_and_let_through():
    copied = {
        word
        for name, rest in stages()[0]
        if name == "COPY"
        for word in shlex.split(rest)[:-1]
        if not word.startswith("-")
    }
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]

    assert ignored[1] == "*"
    for path in copied:
        assert (ROOT / path).exists()
        assert any(fnmatch.fnmatch(path, pattern) for pattern in let_through)


def test_every_folder_of_the_package_is_copied(project):
    folders = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    text = FILE.read_text()

    assert all(f"COPY {folder} {folder}\n" in text for folder in folders)


def test_it_runs_as_the_charts_user_with_the_charts_command():
    last = dict(stages()[-1])

    assert last["USER"] == f"{chart().values['runAsUser']:.0f}:{chart().values['runAsUser']:.0f}"
    assert last["ENTRYPOINT"] == '["kvstore"]'
    assert store_container(pod_specs(render())["Pod/demo-kvstore-test"])["args"][0] == "serve"
    assert [name for name, _ in stages()[-1]][-3:] == ["USER", "ENTRYPOINT", "CMD"]


def test_the_extras_of_both_variants_exist(project):
    text = FILE.read_text()
    variants = dict(re.findall(r"(cpu|cuda)\) extras=([\w,]+) ;;", text))

    assert set(variants) == {"cpu", "cuda"}
    for extras in variants.values():
        assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


def test_files_of_packages_that_do_not_compile_end_no_build():
    (command,) = [rest for name, rest in stages()[0] if name == "RUN" and "compileall" in rest]

    assert command.split(";")[-1].endswith("|| true")


def test_what_is_written_at_run_time_lies_where_the_chart_mounts_a_volume():
    # CuPy makes the folder when it is imported, and the image's user has no home.
    given = dict(word.split("=", 1) for word in dict(stages()[-1])["ENV"].split())
    mounts = {
        at["mountPath"]
        for at in store_container(pod_specs(render())["Pod/demo-kvstore-test"])["volumeMounts"]
    }

    assert given["CUPY_CACHE_DIR"].startswith("/tmp/")
    assert "/tmp" in mounts


def test_nothing_is_fetched_but_packages():
    text = " ".join(rest for _, rest in instructions())

    assert re.findall(r"\b(?:curl|wget|git|sudo|apt-get)\b", text) == []
    assert [name for name, _ in instructions() if name in {"ADD", "VOLUME", "MAINTAINER"}] == []
