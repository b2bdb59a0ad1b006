"""The kernels compile for real devices: by nvcc without spilling a register, by NVRTC without a driver."""

import re
import shutil
import threading
from pathlib import Path

import pytest

from kvstore_kernels import precompile
from kvstore_kernels.binary_cache import BinaryCache
from kvstore_kernels.compiling import (
    KernelBinaries,
    KernelsUnavailable,
    NvccCompiler,
    NvrtcCompiler,
    open_nvrtc,
    translation_unit,
)
from kvstore_kernels.launching import KernelSpec
from kvstore_kernels.moves import copy_spec
from tests.kernels.conftest import not_possible
from tests.kernels.specs import BF16, COMBINES, CONVERSIONS, COPIES, DECODES, E4M3, PREFILLS, SPECS

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
ELF = b"\x7fELF"


@pytest.fixture(scope="session")
def nvcc(cuda_headers: Path) -> NvccCompiler:
    # The package nvidia-cuda-nvcc puts it beside its headers.
    packaged = cuda_headers.parent / "bin" / "nvcc"
    found = str(packaged) if packaged.exists() else shutil.which("nvcc")
    if found is None:
        not_possible("no nvcc found: pip install 'tiered-kvstore[kernels]', or CUDA 13")
    return NvccCompiler(Path(found), cuda_headers)


@pytest.fixture(scope="session")
def nvrtc(cuda_headers: Path) -> NvrtcCompiler:
    try:
        return open_nvrtc()
    except KernelsUnavailable as error:
        not_possible(str(error))


def resources(report: str) -> dict[str, tuple[int, int]]:
    """Spilled bytes and registers of each kernel in ptxas's report."""
    found: dict[str, tuple[int, int]] = {}
    name, spilled = "", 0
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        elif spill := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", line):
            spilled = sum(int(n) for n in spill.groups())
        elif used := re.search(r"Used (\d+) registers", line):
            found[name] = (spilled, int(used[1]))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "specs", [[*COPIES, *CONVERSIONS, *COMBINES], DECODES, PREFILLS], ids=["moves", "decode", "prefill"]
)
def test_nvcc_builds_without_spills(nvcc: NvccCompiler, specs: list[KernelSpec], architecture: str) -> None:
    cubin, report = nvcc.compile_with_report(translation_unit(specs), architecture)

    found = resources(report)
    assert cubin.startswith(ELF)
    assert "warning" not in report
    assert found.keys() == {spec.name for spec in specs}
    assert [name for name, (spilled, _) in found.items() if spilled] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_without_a_driver(nvrtc: NvrtcCompiler, architecture: str) -> None:
    few = [
        COPIES[0],
        CONVERSIONS[0],
        CONVERSIONS[-1],
        DECODES[3],
        DECODES[6],
        PREFILLS[3],
        PREFILLS[6],
        COMBINES[0],
    ]
    cubin = nvrtc.compile(translation_unit(few), architecture)

    assert cubin.startswith(ELF)
    assert all(spec.name.encode() in cubin for spec in few)


def test_a_source_that_does_not_compile_says_why(nvrtc: NvrtcCompiler, nvcc: NvccCompiler) -> None:
    for compiler in (nvrtc, nvcc):
        with pytest.raises(KernelsUnavailable, match="no_such_type"):
            compiler.compile('extern "C" __global__ void f(no_such_type x) {}', "sm_90")


def test_a_kernel_is_compiled_once_per_source_architecture_and_compiler(
    nvrtc: NvrtcCompiler, tmp_path: Path
) -> None:
    class Counting:
        def __init__(self, version: str) -> None:
            self.version = version
            self.compiled: list[str] = []

        def compile(self, source: str, architecture: str) -> bytes:
            self.compiled.append(architecture)
            return nvrtc.compile(source, architecture)

    first, second, newer = Counting("1"), Counting("1"), Counting("2")
    spec, other = copy_spec(16), copy_spec(8)

    binary = KernelBinaries(first, BinaryCache(tmp_path / "c"), "sm_90").get(spec)
    again = KernelBinaries(second, BinaryCache(tmp_path / "c"), "sm_90")

    assert again.get(spec) == binary
    assert second.compiled == []
    again.get(other)
    KernelBinaries(second, BinaryCache(tmp_path / "c"), "sm_80").get(spec)
    KernelBinaries(newer, BinaryCache(tmp_path / "c"), "sm_90").get(spec)
    assert (first.compiled, second.compiled, newer.compiled) == (["sm_90"], ["sm_90", "sm_80"], ["sm_90"])


@pytest.mark.parametrize("options", [[], ["--nvcc"]])
def test_kernels_compiled_ahead_of_time_need_no_compiler(
    nvrtc: NvrtcCompiler, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if options and shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    asked = ["--architecture", "sm_90", "--head-dim", "64", "--kv-dtype", "float8_e4m3"]
    assert precompile.main(["--cache-dir", str(tmp_path / "c"), *asked, *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7

    binaries = KernelBinaries(None, BinaryCache(tmp_path / "c"), "sm_90")
    for spec in precompile.specs_for(BF16, E4M3, 64, "sm_90"):
        assert binaries.get(spec).startswith(ELF)
    with pytest.raises(KernelsUnavailable, match="not compiled ahead of time"):
        binaries.get(copy_spec(8))
    with pytest.raises(KernelsUnavailable, match="needs a compiler"):
        binaries.keep_ahead(copy_spec(8))


def test_compiling_ahead_of_time_says_what_is_wrong(
    nvrtc: NvrtcCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    sizes = ["--architecture", "sm_90", "--head-dim", "64"]
    assert precompile.main(["--cache-dir", str(tmp_path / "file"), *sizes]) == 1
    assert "cannot write" in capsys.readouterr().err
    assert precompile.main(["--cache-dir", str(tmp_path), "--architecture", "sm_1", "--head-dim", "64"]) == 1
    assert "sm_1" in capsys.readouterr().err


def test_names_of_builds_are_unique() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_a_cached_binary_comes_back(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "a" / "b")
    assert cache.read("k") is None
    assert cache.write("k", b"binary")
    assert cache.read("k") == b"binary"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["k.bin"]


def test_a_torn_or_changed_file_counts_as_absent(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "c")
    cache.write("k", b"binary" * 100)
    path = tmp_path / "c" / "k.bin"
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:20],
        b"",
        whole[:200] + b"X" + whole[201:],
        b"Y" + whole[1:],
        whole + b"Z",
    ):
        path.write_bytes(damaged)
        assert cache.read("k") is None
    cache.write("k", b"anew")
    assert cache.read("k") == b"anew"


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    cache = BinaryCache(folder)
    cache.write("k", b"binary")
    folder.chmod(0o770)
    assert cache.read("k") is None
    assert not cache.write("k", b"other")


def test_a_link_in_place_of_the_folder_or_a_file_is_not_followed(tmp_path: Path) -> None:
    real = BinaryCache(tmp_path / "real")
    real.write("k", b"binary")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "other.bin").symlink_to(tmp_path / "real" / "k.bin")
    assert BinaryCache(tmp_path / "link").read("k") is None
    assert real.read("other") is None


def test_a_cache_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = BinaryCache(tmp_path / "file" / "folder")
    assert cache.read("k") is None
    assert not cache.write("k", b"binary")


def test_many_writers_of_one_key_leave_one_whole_file(tmp_path: Path) -> None:
    bodies = [bytes([i]) * 100_000 for i in range(8)]
    wrong: list[bytes] = []

    def work(body: bytes) -> None:
        cache = BinaryCache(tmp_path / "c")
        for _ in range(20):
            cache.write("k", body)
            seen = cache.read("k")
            if seen not in bodies:
                wrong.append(seen or b"")

    threads = [threading.Thread(target=work, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["k.bin"]
