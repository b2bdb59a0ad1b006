"""A command on a terminal of its own, whose output is read and whose keys are pressed."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

WAIT_S = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class PseudoTerminal:
    def __init__(self, words, *, environ, rows=30, columns=80):
        self._words = words
        self._environ = environ
        self._size = struct.pack("HHHH", rows, columns, 0, 0)
        self.raw = ""

    def __enter__(self):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, self._size)
        self.settings = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            self._words, stdin=theirs, stdout=theirs, stderr=theirs, env=self._environ, start_new_session=True
        )
        self._theirs = theirs  # kept open, so that its settings can be looked at afterwards
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        if self._theirs is not None:
            os.close(self._theirs)

    @property
    def screen(self):
        """What was drawn last, without colour."""
        return _ESCAPES.sub("", self.raw.rpartition("\x1b[H")[2])

    def press(self, keys):
        os.write(self._ours, keys.encode())

    def until(self, condition):
        """Read until it holds of what was drawn."""
        give_up_s = time.monotonic() + WAIT_S
        while not condition(self.screen):
            assert time.monotonic() < give_up_s, self.screen
            if select.select([self._ours], [], [], 0.1)[0]:
                self.raw += os.read(self._ours, 1 << 16).decode(errors="replace")
        return self.screen

    def end(self):
        """Wait for its end, reading all there is; returns its exit status."""
        give_up_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < give_up_s, self.screen
            if select.select([self._ours], [], [], 0.1)[0]:
                self.raw += os.read(self._ours, 1 << 16).decode(errors="replace")
        self.settings_now = termios.tcgetattr(self._theirs)
        os.close(self._theirs)
        self._theirs = None
        # Once nobody has the other side, reading fails after the last byte.
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 1 << 16):
                self.raw += data.decode(errors="replace")
        return self.process.returncode
