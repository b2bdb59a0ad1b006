"""UnrulyStream: what a bad network makes of a server's replies, from a seed, for ReplyProxy."""

import itertools
import random
import threading


class UnrulyStream:
    """Now and then truncates, repeats, delays, swaps or cuts a piece of the stream."""

    def __init__(self, seed: int, *, odds: float, delay_s: float) -> None:
        self.done: dict[str, int] = {}
        self._dice = random.Random(seed)
        self._faults = itertools.cycle(self._dice.sample(FAULTS, len(FAULTS)))
        self._odds = odds
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._held = b""
        self._never = threading.Event()

    def __call__(self, data: bytes) -> bytes | None:
        with self._lock:
            held, self._held = self._held, b""
            fault = next(self._faults) if self._dice.random() < self._odds else "nothing"
            self.done[fault] = self.done.get(fault, 0) + 1
            place = self._dice.randrange(len(data))
            delay_s = self._dice.random() * self._delay_s
            if fault == "hold":
                self._held = data
        if fault == "delay":
            self._never.wait(delay_s)
        changed = {
            "truncate": data[:place],
            "lose": data[:place] + data[place + self._dice.randrange(1, 200) :],
            "repeat": data + data[place:],
            "insert": data[:place] + b"+OK\r\n" + data[place:],
            "swap": data[place:] + data[:place],
            "hold": b"",
        }.get(fault, data)
        return None if fault == "cut" else changed + held


FAULTS = ["truncate", "lose", "repeat", "insert", "swap", "delay", "hold", "cut"]
