"""TerminalKeys: single key presses of a terminal, without waiting for the end of a line."""

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Self


class TerminalKeys:
    """Reads keys from standard input while it is entered; where that is no terminal, there are none.

    The terminal's settings are put back at the end. Ctrl-C stays an interrupt.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._settings: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            fd = sys.stdin.fileno()
            self._fd, self._settings = fd, termios.tcgetattr(fd)
            tty.setcbreak(fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None and self._settings is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def wait(self, seconds: float, stop: str) -> bool:
        """Wait; True, at once, when one of the keys in ``stop`` is pressed."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if self._fd is None:
                time.sleep(left_s)
                return False
            if not select.select([self._fd], [], [], left_s)[0]:
                return False
            pressed = os.read(self._fd, 64)
            if not pressed:  # the terminal is gone
                return True
            if any(key in stop for key in pressed.decode("latin-1")):
                return True
        return False
