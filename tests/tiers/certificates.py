"""Certificates for tests, made with the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """An authority of its own that signs certificates for a name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.own = Certificate(folder / "ca.pem", folder / "ca.key")
        _openssl(
            f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test-authority"
            f" -keyout {self.own.key} -out {self.own.cert}"
        )

    def sign(self, name: str, *, alternative: str) -> Certificate:
        """Return a certificate whose alternative name is ``DNS:localhost`` or ``IP:127.0.0.1``."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extra = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extra.write_text(f"subjectAltName={alternative}\n")
        _openssl(f"req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {made.key} -out {request}")
        _openssl(
            f"x509 -req -in {request} -CA {self.own.cert} -CAkey {self.own.key} -CAcreateserial -days 2"
            f" -extfile {extra} -out {made.cert}"
        )
        return made

    def folder(self, name: str, ours: Certificate | None = None) -> Path:
        """Return a new folder to trust this authority by, and to show a certificate from if one is given."""
        made = self._folder / name
        made.mkdir()
        shutil.copy(self.own.cert, made / "ca.crt")
        if ours is not None:
            shutil.copy(ours.cert, made / "tls.crt")
            shutil.copy(ours.key, made / "tls.key")
        return made


def _openssl(words: str) -> None:
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
