"""MountedDisk: a small disk of its own in a mount namespace, to be filled up and made read-only."""

import shutil
import subprocess
from pathlib import Path

from kvstore.drill.store_process import PartFailed, guarded

_PATIENCE_S = 10.0


def mount_obstacle() -> str:
    """Return why such a disk cannot be had; empty if it can."""
    for program in ("unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program} (util-linux)"
    tried = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )
    if tried.returncode:
        said = tried.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return f"no mount namespace of one's own: {said[0]}"
    return ""


class MountedDisk:
    """A tmpfs of ``size_bytes`` at ``folder``, seen only by processes started with ``prefix``."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        script = 'mount -t tmpfs -o mode=700,size="$2" tmpfs "$1" && echo ready && exec cat'
        # The namespace lives as long as this process, which ends with its standard input.
        self._holder = subprocess.Popen(
            guarded(["unshare", "-Urm", "sh", "-c", script, "sh", str(folder), str(size_bytes)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None, "it was started with a pipe"
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise PartFailed("no disk of one's own could be mounted")

    @property
    def prefix(self) -> list[str]:
        """Words before a command that is to see the disk."""
        return ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials", "--"]

    @property
    def outside(self) -> Path:
        """The disk's folder as this process sees it."""
        return Path(f"/proc/{self._holder.pid}/root{self.folder}")

    def fill_up(self, *, spare_bytes: int = 0) -> None:
        """Take all room on the disk but so much."""
        with (self.outside / "filler").open("wb", buffering=0) as filler:
            chunk = bytes(64 << 10)
            try:
                while True:
                    filler.write(chunk)
            except OSError:
                filler.truncate(max(0, filler.tell() - spare_bytes))

    def empty(self) -> None:
        """Give that room back."""
        (self.outside / "filler").unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Refuse writes from now on; nothing may be open for writing."""
        self._remount("ro")

    def make_writable(self) -> None:
        """Allow writes again."""
        self._remount("rw")

    def close(self) -> None:
        """Let the disk go. Idempotent."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()

    def _remount(self, how: str) -> None:
        words = [*self.prefix, "mount", "-o", f"remount,{how}", str(self.folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
        if done.returncode:
            raise PartFailed(f"the disk cannot be made {how}: {done.stderr.strip()}")
