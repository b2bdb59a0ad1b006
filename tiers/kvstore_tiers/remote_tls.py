"""TlsFolder: how the remote tier proves itself to a server, and which server it trusts."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import TierUnavailable

_AUTHORITIES, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True, slots=True)
class TlsFolder:
    """A folder of PEM files with the names of a Kubernetes TLS secret.

    Without ``ca.crt``, or without a folder, the system's authorities are trusted; without ``tls.crt`` and
    ``tls.key`` we show no certificate. The server's certificate and its host name are always checked.
    """

    path: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files. Blocks.

        Raises:
            TierUnavailable: the folder or a file cannot be read or does not hold what it should.
        """
        files = self._files()
        context = _trusting(files.get(_AUTHORITIES))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if _CERTIFICATE in files:
            try:
                # An empty password instead of a question on the terminal.
                context.load_cert_chain(files[_CERTIFICATE], files[_KEY], password="")
            except OSError as error:
                raise TierUnavailable(
                    f"remote: tls_folder {self.path}: {_CERTIFICATE} with {_KEY}:"
                    f" {error.strerror or error}: expected PEM files of one pair, without a password"
                ) from error
        return context

    def _files(self) -> dict[str, Path]:
        if self.path is None:
            return {}
        try:
            # By name and not by what it leads to: a link to nowhere must not pass for an absent file.
            names = {file.name for file in self.path.iterdir()}
        except OSError as error:
            raise TierUnavailable(
                f"remote: tls_folder {self.path}: {error.strerror}: let the server's user read it"
            ) from error
        files = {name: self.path / name for name in (_AUTHORITIES, _CERTIFICATE, _KEY) if name in names}
        if not files:
            raise TierUnavailable(
                f"remote: tls_folder {self.path}: holds neither {_AUTHORITIES} nor {_CERTIFICATE} and {_KEY}:"
                " name the folder of these files"
            )
        if (_CERTIFICATE in files) != (_KEY in files):
            raise TierUnavailable(
                f"remote: tls_folder {self.path}: holds one of {_CERTIFICATE} and {_KEY}: add the other"
            )
        return files


def _trusting(authorities: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise TierUnavailable(
            f"remote: tls_folder: {authorities}: {error.strerror or error}: expected PEM certificates"
        ) from error
