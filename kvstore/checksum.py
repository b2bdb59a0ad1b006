"""Integrity of payloads: xxh3-64, taken in the same pass as the copy.

xxHash finds damage; it never names anything (its collisions can be made on purpose). Which side is summed
decides what it can find. A reader sums what arrived and compares: any other byte is damage. A writer sums
what it was given: if another process stores into the destination meanwhile, the copy there has the wrong sum
and no reader takes it, whereas a sum of the destination would vouch for the foreign bytes.

Copies of all but small blocks go through NumPy in long steps, so that the checksum reads the bytes while they
are in cache and the GIL is released for both; the copy comes first, which reads memory faster than a checksum
does. See docs/data_plane.md, "Copies", for what was measured.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest

ByteBuffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]
"""Contiguous bytes; a memoryview of any format is read as bytes."""

STEP_BYTES = 2 << 20
"""Bytes copied out of an arena before they are summed."""

SOURCE_STEP_BYTES = 1 << 20
"""Bytes copied into an arena before they are summed."""

WORDS_FROM_BYTES = 64 << 10
"""Copies from here on are loops over words, where both sides lie on whole words.

Up to 1 MiB or so the C library copies by the processor's own instruction for strings. On AMD's Zen 4 that
takes two to five times as long if the destination begins a few bytes behind the source in a page of 4 KiB
(glibc's bug 30994), as every large NumPy array does to a slot.
"""

_TARGET_WORD, _ORIGIN_WORD = np.dtype(np.uint64), np.dtype(np.int64)

SMALL_BYTES = 16 << 10
"""Blocks up to here are copied by memoryviews, which keep the GIL: NumPy's calls take longer than the copy.

Measured, 64 blocks of 4 KiB with their checksums, 2 cores: 54 us in place of 88 into an arena, 48 in place of
74 out of it.
"""


def as_bytes_array(buffer: ByteBuffer) -> npt.NDArray[np.uint8]:
    """Return a flat uint8 array over the same memory, read-only if the buffer is."""
    if isinstance(buffer, np.ndarray):
        is_flat = buffer.ndim == 1 and buffer.dtype == np.uint8
        return buffer if is_flat else buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


def checksum(buffer: ByteBuffer) -> int:
    """Return the xxh3-64 of the bytes."""
    if isinstance(buffer, bytes):
        return xxhash.xxh3_64_intdigest(buffer)
    return xxhash.xxh3_64_intdigest(as_bytes_array(buffer))  # type: ignore[arg-type]  # takes any buffer


class RunningChecksum:
    """The xxh3-64 of bytes that come in pieces, each summed while it is in cache. One thread at a time."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, piece: memoryview | npt.NDArray[np.uint8]) -> None:
        """Add the bytes of a piece; releases the GIL."""
        self._digest.update(piece)  # type: ignore[arg-type]  # takes any buffer

    @property
    def value(self) -> int:
        """The sum of what was added so far."""
        return self._digest.intdigest()


def copy_bytes(target: npt.NDArray[np.uint8], origin: npt.NDArray[np.uint8]) -> None:
    """Copy flat arrays of one length; releases the GIL."""
    length_bytes = len(origin)
    if length_bytes >= WORDS_FROM_BYTES and not length_bytes % 8:
        target_words, origin_words = target.view(_TARGET_WORD), origin.view(_ORIGIN_WORD)
        if target_words.flags.aligned and origin_words.flags.aligned:
            # NumPy converts with a loop of its own, and hands what needs no conversion to the C library.
            np.copyto(target_words, origin_words, casting="unsafe")
            return
    target[:] = origin


def copy_with_checksum(destination: ByteBuffer, source: ByteBuffer, *, step_bytes: int = STEP_BYTES) -> int:
    """Copy ``source`` to ``destination`` and return the xxh3-64 of what arrived there.

    Raises:
        InvalidRequest: the two differ in length.
    """
    return copy_array_with_checksum(*_paired(destination, source), step_bytes=step_bytes)


def copy_array_with_checksum(
    target: npt.NDArray[np.uint8], origin: npt.NDArray[np.uint8], *, step_bytes: int = STEP_BYTES
) -> int:
    """As ``copy_with_checksum``, of flat arrays of one length."""
    if len(origin) <= step_bytes:
        copy_bytes(target, origin)
        return xxhash.xxh3_64_intdigest(target)  # type: ignore[arg-type]  # takes any buffer
    digest = xxhash.xxh3_64()
    for start in range(0, len(origin), step_bytes):
        window = target[start : start + step_bytes]
        copy_bytes(window, origin[start : start + step_bytes])
        digest.update(window)  # type: ignore[arg-type]  # takes any buffer
    return digest.intdigest()


def copy_with_source_checksum(
    destination: ByteBuffer,
    source: ByteBuffer,
    *,
    may_go_on: Callable[[], bool] = lambda: True,
    step_bytes: int = SOURCE_STEP_BYTES,
) -> int | None:
    """Copy ``source`` to ``destination`` and return the xxh3-64 of the source.

    ``may_go_on`` is asked before each step; once it says no, nothing more is written and None is returned.

    Raises:
        InvalidRequest: the two differ in length.
    """
    return copy_array_with_source_checksum(
        *_paired(destination, source), may_go_on=may_go_on, step_bytes=step_bytes
    )


def copy_small_in(
    memory: memoryview,
    offsets: Sequence[int],
    origins: Sequence[npt.NDArray[np.uint8]],
    length_bytes: int,
) -> list[int]:
    """Copy arrays of one length to places in memory; returns the xxh3-64 of each source."""
    digests: list[int] = []
    for offset, origin in zip(offsets, origins, strict=True):
        memory[offset : offset + length_bytes] = origin  # type: ignore[call-overload]  # takes any buffer
        digests.append(xxhash.xxh3_64_intdigest(origin))  # type: ignore[arg-type]  # takes any buffer
    return digests


def copy_arrays_in(
    targets: Sequence[npt.NDArray[np.uint8]], origins: Sequence[npt.NDArray[np.uint8]]
) -> list[int]:
    """Copy flat arrays of one length, each in one step; returns the xxh3-64 of each source."""
    digests: list[int] = []
    for target, origin in zip(targets, origins, strict=True):
        copy_bytes(target, origin)
        digests.append(xxhash.xxh3_64_intdigest(origin))  # type: ignore[arg-type]  # takes any buffer
    return digests


def copy_small_out(
    targets: Sequence[npt.NDArray[np.uint8]],
    memory: memoryview,
    offsets: Sequence[int],
    length_bytes: int,
) -> list[int]:
    """Copy places in memory into arrays of one length; returns the xxh3-64 of what arrived in each."""
    digests: list[int] = []
    for target, offset in zip(targets, offsets, strict=True):
        view = memoryview(target)  # type: ignore[arg-type]  # takes any buffer
        view[:] = memory[offset : offset + length_bytes]
        digests.append(xxhash.xxh3_64_intdigest(view))
    return digests


def copy_array_with_source_checksum(
    target: npt.NDArray[np.uint8],
    origin: npt.NDArray[np.uint8],
    *,
    may_go_on: Callable[[], bool] = lambda: True,
    step_bytes: int = SOURCE_STEP_BYTES,
    begun: RunningChecksum | None = None,
) -> int | None:
    """As ``copy_with_source_checksum``, of flat arrays of one length.

    ``begun``, of more than one step, has summed the first ``step_bytes`` of the source.
    """
    if len(origin) <= step_bytes:
        if not may_go_on():
            return None
        copy_bytes(target, origin)
        return xxhash.xxh3_64_intdigest(origin)  # type: ignore[arg-type]  # takes any buffer
    digest = RunningChecksum() if begun is None else begun
    for start in range(0, len(origin), step_bytes):
        if not may_go_on():
            return None
        window = origin[start : start + step_bytes]
        copy_bytes(target[start : start + step_bytes], window)
        if start or begun is None:
            digest.add(window)
    return digest.value


def _paired(
    destination: ByteBuffer, source: ByteBuffer
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    target, origin = as_bytes_array(destination), as_bytes_array(source)
    if len(target) != len(origin):
        raise InvalidRequest(f"copy: source has {len(origin)} bytes, destination {len(target)}")
    return target, origin
