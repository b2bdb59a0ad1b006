"""ByteStack: things in the order of their last use, and how many bytes of others lie above each."""

from typing import Generic, TypeVar

K = TypeVar("K")


class ByteStack(Generic[K]):
    """Keys in order of use, each with a size. ``above`` is the stack distance of Mattson et al. (1970).

    Places are numbered; the newest is the highest. Sizes are summed per run of ``_RUN`` places, so that a
    change costs two additions and a distance two short sums: with places for some ten thousand keys that is
    quicker in CPython than a tree. When places run out, keys move together, in their order.
    """

    _RUN = 128

    def __init__(self, max_keys: int) -> None:
        num_runs = -(-2 * max_keys // self._RUN)
        self._places: dict[K, int] = {}
        self._keys: list[K | None] = [None] * (num_runs * self._RUN)
        self._sizes = [0] * len(self._keys)
        self._sums = [0] * num_runs
        self._next = 0
        self._floor = 0  # no key lies below
        self.total_bytes = 0
        self.max_keys = max_keys

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: K) -> bool:
        return key in self._places

    def push(self, key: K, size_bytes: int) -> None:
        """Put a key on top, which may be in the stack. There must be fewer than ``max_keys`` others."""
        if key in self._places:
            self.remove(key)
        assert len(self._places) < self.max_keys, "the stack is full"
        if self._next == len(self._keys):
            self._close_up()
        place = self._next
        self._next = place + 1
        self._places[key] = place
        self._keys[place] = key
        # A place that has no key yet has no bytes.
        self._sizes[place] = size_bytes
        self._sums[place // self._RUN] += size_bytes
        self.total_bytes += size_bytes

    def resize(self, key: K, size_bytes: int) -> None:
        """Change the size of a key of the stack, which stays where it is."""
        place = self._places[key]
        more_bytes = size_bytes - self._sizes[place]
        self._sizes[place] = size_bytes
        self._sums[place // self._RUN] += more_bytes
        self.total_bytes += more_bytes

    def remove(self, key: K) -> None:
        """Take a key out, if it is there."""
        place = self._places.pop(key, None)
        if place is not None:
            self._keys[place] = None
            size_bytes = self._sizes[place]
            self._sizes[place] = 0
            self._sums[place // self._RUN] -= size_bytes
            self.total_bytes -= size_bytes

    def above(self, key: K) -> int:
        """Return the bytes of the keys used after this one."""
        place = self._places[key]
        run = place // self._RUN
        end = (run + 1) * self._RUN
        return sum(self._sums[run + 1 :]) + sum(self._sizes[place + 1 : end])

    def size(self, key: K) -> int:
        """Return the bytes of a key of the stack."""
        return self._sizes[self._places[key]]

    def deepest(self) -> K | None:
        """Return the key used longest ago; None if there is none."""
        while self._floor < self._next:
            key = self._keys[self._floor]
            if key is not None:
                return key
            self._floor += 1
        return None

    def _close_up(self) -> None:
        kept = [(key, self._sizes[place]) for place, key in enumerate(self._keys) if key is not None]
        num_free, run = len(self._keys) - len(kept), self._RUN
        self._keys = [*(key for key, _ in kept), *([None] * num_free)]
        self._sizes = [*(size for _, size in kept), *([0] * num_free)]
        self._sums = [sum(self._sizes[start : start + run]) for start in range(0, len(self._sizes), run)]
        self._places = {key: place for place, (key, _) in enumerate(kept)}
        self._next, self._floor = len(kept), 0
