"""SecretSource: where a secret lies, so that configurations name the place and never hold the secret."""

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InvalidConfig

EXPECTED = '"env:NAME" or "file:/PATH", the place of the secret'

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_PATH_MAX_BYTES = 4096
_FILE_MAX_CHARS = 1 << 20
_READABLE_BY_OTHERS = stat.S_IROTH


@dataclass(frozen=True, slots=True)
class SecretSource:
    """``env:NAME``, an environment variable, or ``file:/PATH``, a UTF-8 file. Holds no secret itself.

    Exactly one of ``variable`` and ``file`` is given. Its text and repr name the place alone.
    """

    variable: str | None = None
    file: Path | None = None

    @classmethod
    def parse(cls, text: object) -> "SecretSource":
        """Return the place that a configuration's value names.

        Raises:
            ValueError: of another form. The message never holds the value: it may be the secret.
        """
        kind, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
        if colon and kind == "env" and _VARIABLE.fullmatch(name):
            return cls(variable=name)
        if colon and kind == "file" and _is_path(name):
            return cls(file=Path(name))
        raise ValueError("does not say where the secret is (value not shown)")

    def read(self, environ: Mapping[str, str], *, key: str) -> str:
        """Return the secret, the first line of what is there. Blocks on a file.

        ``key`` begins the message of an error: ``[tiers.remote] password``.

        Raises:
            InvalidConfig: the variable is not set, the file cannot be read, or the first line is empty.
        """
        line = self.read_text(environ, key=key).partition("\n")[0].rstrip("\r")
        if not line:
            raise InvalidConfig(f"{key}: {self}: its first line is empty: write the secret there")
        return line

    def read_text(self, environ: Mapping[str, str], *, key: str) -> str:
        """Return all that is there, for places that hold several secrets, a line each. Blocks on a file.

        Raises:
            InvalidConfig: the variable is not set, or the file cannot be read; or it is empty.
        """
        text = environ.get(self.variable, "") if self.variable is not None else self._file_text(key)
        if text:
            return text
        if self.variable is not None:
            problem = (
                f"environment variable {self.variable} is not set or empty: set it where the server starts"
            )
        else:
            problem = "the file is empty: write the secret there"
        raise InvalidConfig(f"{key}: {self}: {problem}")

    @property
    def is_readable_by_others(self) -> bool:
        """Whether it is a file that users other than its owner may read, as mounted secrets often are."""
        if self.file is None:
            return False
        try:
            return bool(self.file.stat().st_mode & _READABLE_BY_OTHERS)
        except OSError:
            return False  # reading it will tell

    def _file_text(self, key: str) -> str:
        assert self.file is not None
        try:
            with self.file.open(encoding="utf-8") as file:
                text = file.read(_FILE_MAX_CHARS + 1)
        except OSError as error:
            raise InvalidConfig(
                f"{key}: {self}: cannot be read: {error.strerror}: let the server's user read it"
            ) from None
        except UnicodeDecodeError:
            # Its text would show the bytes.
            raise InvalidConfig(f"{key}: {self}: is not UTF-8 text: name the file of the secret") from None
        if len(text) > _FILE_MAX_CHARS:
            raise InvalidConfig(f"{key}: {self}: larger than 1 MiB: name the file of the secret")
        return text

    def __str__(self) -> str:
        """Return it as a configuration writes it."""
        return f"env:{self.variable}" if self.variable is not None else f"file:{self.file}"


def _is_path(name: str) -> bool:
    return name.startswith("/") and name.isprintable() and len(name.encode()) <= _PATH_MAX_BYTES
