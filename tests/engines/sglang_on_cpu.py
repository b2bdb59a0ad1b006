"""What SGLang lacks on a CPU: packages that only GPUs need, three copies between device and host
pages, and attention that finds windows in a pool of their own.

``install`` is called before SGLang is imported, in the main process and in those that it spawns.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

ABSENT = ("torchvision", "torchaudio", "sgl_kernel", "cutlass", "pandas", "IPython")
"""Packages that SGLang imports and that a text model on a CPU does not use."""


class _Kind(type):
    """The type of classes whose attributes are all there."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Nothing(metaclass=_Kind):
    """A class that takes anything; calling an object of it returns what it is given, as a decorator does."""

    def __init__(self, *given: object, **named: object) -> None:
        """Take anything."""

    def __call__(self, *given: object, **named: object) -> object:
        return given[0] if given else self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Anything(ModuleType):
    """A module of which every name is a class that takes anything."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = _Anything(spec.name)
        made.__version__ = "0.0"
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are made when they are asked for."""


def install() -> None:
    """Make the absent packages importable, and give host pools their copies in plain torch."""
    sys.meta_path.insert(0, _Finder())
    from sglang.srt.mem_cache.pool_host import mha

    mha.transfer_kv_direct = _copy_direct
    mha.transfer_kv_all_layer_direct_lf_pf = _copy_to_pages
    mha.transfer_kv_per_layer_direct_pf_lf = _copy_from_pages
    make = mha.MHATokenToKVPoolHost.__init__

    def make_unpinned(self: object, *given: object, **named: object) -> None:
        named["pin_memory"] = False
        make(self, *given, **named)

    mha.MHATokenToKVPoolHost.__init__ = make_unpinned
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _reading_windows(getattr(TorchNativeAttnBackend, name)))


def _reading_windows(run: Callable) -> Callable:
    """Have attention read windows where they lie.

    SGLang's attention in plain torch writes layers with a window into their own pool, and reads them by the
    indices of the other one: prompts that reuse anything are answered wrongly, with and without HiCache.
    """

    def run_translated(self: object, *given: object, **named: object) -> object:
        window = named.get("sliding_window_size")
        if self.use_sliding_window_kv_pool and window is not None and window > -1:
            query, output, keys, values, table, *rest = given
            table = self.token_to_kv_pool.translate_loc_from_full_to_swa(table)
            given = (query, output, keys, values, table, *rest)
        return run(self, *given, **named)

    return run_translated


def _copy_direct(
    *, src_layers: list, dst_layers: list, src_indices: object, dst_indices: object, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _copy_to_pages(
    *, src_ptrs: list, dst_ptrs: list, src_indices: object, dst_indices: object, page_size: int
) -> None:
    # src: keys of every layer, then values of every layer; dst: [pages, layers, page_size, heads, dim] each.
    num_layers = len(src_ptrs) // 2
    pages, rows = dst_indices // page_size, dst_indices % page_size
    for plane, target in enumerate(dst_ptrs):
        for layer in range(num_layers):
            target[pages, layer, rows] = src_ptrs[plane * num_layers + layer][src_indices]


def _copy_from_pages(
    *,
    src_ptrs: list,
    dst_ptrs: list,
    src_indices: object,
    dst_indices: object,
    layer_id: int,
    page_size: int,
) -> None:
    pages, rows = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, rows]
