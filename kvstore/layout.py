"""KVLayout: shape and dtype of one block; Part: the piece of a block that one engine rank holds."""

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import InvalidLayout

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3": 1, "float8_e5m2": 1, "uint8": 1}
"""Bytes per element of each dtype a layout may name."""

MAX_BLOCK_BYTES = 32 << 20
"""Largest block the store takes; bounds every buffer that is sized from a peer's description."""

_U16_MAX = 0xFFFF
_PART = struct.Struct("<4H")


class Part(NamedTuple):
    """A rectangle of a block: a layer range times a KV-head range, both half-open.

    An engine without tensor or pipeline parallelism has one part, the whole block.
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    @property
    def is_first(self) -> bool:
        """Whether it has the first layer and the first head: it stands for all parts where one is to."""
        return not self.layer_start and not self.head_start

    def pack(self) -> bytes:
        """Return the 8-byte form used in stored headers and storage keys (four little-endian u16)."""
        return _PART.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> "Part":
        """Return the part packed in 8 bytes.

        Raises:
            InvalidLayout: ``data`` is not 8 bytes long or a range is empty.
        """
        if len(data) != _PART.size:
            raise InvalidLayout(f"part: {len(data)} bytes, expected {_PART.size}")
        part = cls(*_PART.unpack(data))
        if part.layer_start >= part.layer_stop or part.head_start >= part.head_stop:
            raise InvalidLayout(f"part: empty range in {tuple(part)}")
        return part


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of the KV bytes of one block.

    A block is one contiguous C-order array
    ``[num_layers, kv_planes, block_tokens, num_kv_heads, head_dim]`` of ``dtype``: plane 0 holds keys
    and plane 1 values (latent-attention models have one plane). ``order`` names that axis order, so that
    engines with another one never share bytes by accident.

    Raises:
        InvalidLayout: an unknown dtype, a dimension outside 1..65535, or a block above 32 MiB.
    """

    dtype: str
    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    kv_planes: int = 2
    order: str = "layer,plane,token,head,dim"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidLayout(f"layout: dtype {self.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "block_tokens", "num_kv_heads", "kv_planes"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= _U16_MAX:
                raise InvalidLayout(f"layout: {name} is {value!r}, expected an integer in 1..{_U16_MAX}")
        if not isinstance(self.head_dim, int) or not 1 <= self.head_dim <= MAX_BLOCK_BYTES:
            raise InvalidLayout(f"layout: head_dim is {self.head_dim!r}, expected 1..{MAX_BLOCK_BYTES}")
        if not self.order or len(self.order) > 64 or not self.order.isprintable():
            raise InvalidLayout("layout: order must be 1 to 64 printable characters")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise InvalidLayout(
                f"layout: a block is {self.block_bytes} bytes, limit {MAX_BLOCK_BYTES}: lower block_tokens"
            )

    @classmethod
    def opaque(cls, *, block_bytes: int, block_tokens: int, order: str = "opaque") -> "KVLayout":
        """Return the layout of blocks whose inner shape is the engine's own affair.

        Raises:
            InvalidLayout: ``block_bytes`` is not a positive multiple of ``block_tokens``.
        """
        if block_tokens < 1 or block_bytes < 1 or block_bytes % block_tokens:
            raise InvalidLayout(
                f"layout: block_bytes {block_bytes} is no positive multiple of block_tokens {block_tokens}"
            )
        return cls(
            dtype="uint8",
            num_layers=1,
            block_tokens=block_tokens,
            num_kv_heads=1,
            head_dim=block_bytes // block_tokens,
            kv_planes=1,
            order=order,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.part_bytes(self.whole)

    @property
    def whole(self) -> Part:
        """The part that is the whole block."""
        return Part(0, self.num_layers, 0, self.num_kv_heads)

    def part_bytes(self, part: Part) -> int:
        """Bytes of one part of a block.

        Raises:
            InvalidLayout: the part is empty or reaches outside this layout.
        """
        layers, heads = part.layer_stop - part.layer_start, part.head_stop - part.head_start
        is_inside = (
            0 <= part.layer_start < part.layer_stop <= self.num_layers
            and 0 <= part.head_start < part.head_stop <= self.num_kv_heads
        )
        if not is_inside:
            raise InvalidLayout(
                f"part {tuple(part)} is not within {self.num_layers} layers x {self.num_kv_heads} KV heads"
            )
        elements = layers * self.kv_planes * self.block_tokens * heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 over every field (32 bytes); equal only for layouts whose bytes mean the same."""
        text = "|".join(
            f"{len(str(value))}:{value}"
            for value in (
                "kvstore.layout.1",
                self.dtype,
                self.num_layers,
                self.kv_planes,
                self.block_tokens,
                self.num_kv_heads,
                self.head_dim,
                self.order,
            )
        )
        return hashlib.sha256(text.encode()).digest()
