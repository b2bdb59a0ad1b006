"""TLS of the server: a folder of PEM files, loaded anew when they change.

``tls.crt`` holds the server's certificate and those between it and its authority, ``tls.key`` its key: the
names of a Kubernetes secret of type kubernetes.io/tls. If there is a ``ca.crt``, clients must show a
certificate of one of its authorities.
"""

import datetime
import hashlib
import logging
import os
import ssl
import stat
import struct
import warnings
from pathlib import Path

from cryptography import x509

from kvstore.errors import InvalidConfig
from kvstore.reloading import Reloaded

logger = logging.getLogger(__name__)

CERT_NAME = "tls.crt"
KEY_NAME = "tls.key"
CA_NAME = "ca.crt"
_FILE_MAX_BYTES = 1 << 20


class ServerTls:
    """The files of one folder, as the server uses them.

    Each state of the files gives a context of its own. A listener takes the latest for each connection, so a
    handshake has nothing of an earlier one: neither its certificate, nor its authorities, nor the sessions it
    granted. Connections that stand are not touched.

    A ``ca.crt`` that was there once stays required: while it is replaced, nobody gets in without a
    certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requires_clients = False

    def reloaded(self) -> Reloaded[ssl.SSLContext]:
        """Return the server's context by the files, and by later ones once they can be used. Blocks.

        Raises:
            InvalidConfig: a file is missing or unreadable, or the key is not the certificate's.
        """
        return Reloaded(f"tls: {self._folder}", self._content, lambda _: self.context())

    def context(self) -> ssl.SSLContext:
        """Make a context of the files: TLS 1.2 or later, client certificates if there is a ca.crt. Blocks.

        Raises:
            InvalidConfig: as ``reloaded``.
        """
        context = _new_context()
        _load_certificate(context, self._folder)
        authorities = self._folder / CA_NAME
        # A link that leads nowhere counts as there: it shows what was meant.
        if self._requires_clients or os.path.lexists(authorities):
            _require_client_certificates(context, authorities)
            self._requires_clients = True
        _warn_if_out_of_date(self._folder / CERT_NAME)
        _warn_if_readable(self._folder / KEY_NAME)
        return context

    def _content(self) -> bytes:
        """Return what tells one state of the files from another."""
        sha = hashlib.sha256()
        for name in (CERT_NAME, KEY_NAME, CA_NAME):
            data = _bounded(self._folder / name)
            sha.update(struct.pack("<q", -1 if data is None else len(data)) + (data or b""))
        return sha.digest()


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def _load_certificate(context: ssl.SSLContext, folder: Path) -> None:
    try:
        context.load_cert_chain(folder / CERT_NAME, folder / KEY_NAME, password=_refuse_password)
    except ssl.SSLError as error:
        raise InvalidConfig(
            f"tls: {folder}: {CERT_NAME} and {KEY_NAME} cannot be used: {error.reason or error}: they must be"
            " PEM, the key not encrypted and the certificate's own"
        ) from None
    except OSError as error:
        raise InvalidConfig(
            f"tls: {folder}: {CERT_NAME} or {KEY_NAME} cannot be read: {error.strerror}"
        ) from error


def _require_client_certificates(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidConfig(f"tls: {path}: is not PEM certificates: {error.reason or error}") from None
    except OSError as error:
        raise InvalidConfig(f"tls: {path}: cannot be read: {error.strerror}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would skip the check of the client's certificate.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0


def _refuse_password() -> bytes:
    # Without this, OpenSSL asks the terminal for the password of an encrypted key, and waits.
    return b""


def _warn_if_out_of_date(path: Path) -> None:
    """Warn of a certificate that clients will refuse; it is used all the same, clients decide."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        ends = certificate.not_valid_after_utc
    except (OSError, ValueError):
        return
    if ends < datetime.datetime.now(datetime.UTC):
        logger.warning("tls: %s: the certificate has expired on %s: replace it", path, ends.date())
    else:
        logger.info("tls: %s: the certificate is valid until %s", path, ends.date())


def _warn_if_readable(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if mode & stat.S_IROTH:
        logger.warning("tls: %s: others may read it: chmod 600 %s", path, path)


def _bounded(path: Path) -> bytes | None:
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            raise InvalidConfig(f"tls: {path}: is a pipe, which nobody may ever write to: make it a file")
        with path.open("rb") as file:
            data = file.read(_FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidConfig(f"tls: {path}: cannot be read: {error.strerror}") from error
    if len(data) > _FILE_MAX_BYTES:
        raise InvalidConfig(f"tls: {path}: is larger than {_FILE_MAX_BYTES} bytes: not a PEM file")
    return data
