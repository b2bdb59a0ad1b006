"""TlsFiles: how the remote tier proves itself to a server, and which server it trusts."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import TierUnavailable


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; what is None is the system's trust store, and no certificate of our own.

    The server's certificate and its host name are always checked.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files. Blocks.

        Raises:
            TierUnavailable: a file cannot be read or does not hold what it should.
        """
        context = self._trusting()
        if self.cert_file is not None:
            try:
                # An empty password instead of a question on the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
            except OSError as error:
                raise TierUnavailable(
                    f"remote: tls_cert_file {self.cert_file} with tls_key_file {self.key_file}:"
                    f" {error.strerror or error}: expected PEM files of one pair, without a password"
                ) from error
        return context

    def _trusting(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise TierUnavailable(
                f"remote: tls_ca_file {self.ca_file}: {error.strerror or error}: expected PEM certificates"
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context
