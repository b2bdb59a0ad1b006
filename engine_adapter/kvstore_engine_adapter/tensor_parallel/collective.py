"""Collective: the sum over ranks that a pass needs, twice a layer, through torch.distributed.

An all-reduce adds in an order that depends on where a number lies in the message, and NCCL's on the size of
the message too. For two ranks that changes nothing: there is one addition, and it commutes. For more, every
rank gathers what all ranks have and adds it in the order of ranks. Sums are float32. So the bits of a row
depend on the ranks' rows alone, never on the rows beside it, and are the same on every rank.
"""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as distributed

from kvstore_engine_adapter.shard import Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Collective:
    """The ranks of one engine, joined; not torch's default group. Used by one thread."""

    def __init__(self, group: distributed.ProcessGroup, shard: Shard) -> None:
        self._group = group
        self._shard = shard

    @classmethod
    def join(cls, rendezvous: Path, shard: Shard, device: torch.device, *, patience_s: float) -> "Collective":
        """Meet the other ranks. Blocking until all are there, at most ``patience_s``.

        ``rendezvous`` is a file in a folder that is the engine's own; every operation later on fails when it
        takes ``patience_s``, or when another rank's process is gone.

        Raises:
            RuntimeError: the others did not come, or cannot be reached.
        """
        patience = timedelta(seconds=patience_s)
        store = distributed.FileStore(str(rendezvous), shard.size)  # type: ignore[attr-defined]  # re-exported
        store.set_timeout(patience)
        group = distributed.ProcessGroup(store, shard.rank, shard.size)
        kinds = distributed.ProcessGroup.BackendType
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = patience
            nccl = distributed.ProcessGroupNCCL(store, shard.rank, shard.size, options)
            group._set_default_backend(kinds.NCCL)
            group._register_backend(device, kinds.NCCL, nccl)
        else:
            gloo = _gloo(store, shard, patience)
            group._set_default_backend(kinds.GLOO)
            group._register_backend(device, kinds.GLOO, gloo)
        return cls(group, shard)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, float32; every rank calls it with a tensor of the same shape.

        Raises:
            RuntimeError: a rank is gone or has not come in time.
        """
        # A copy also where it is float32 already: the sum is made in place.
        whole = partial.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self._shard.size == 2:
            self._group.allreduce([whole]).wait()
            return whole
        parts = [torch.empty_like(whole) for _ in range(self._shard.size)]
        self._group.allgather([parts], [whole]).wait()
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total


def _gloo(store: "Store", shard: Shard, patience: timedelta) -> distributed.ProcessGroupGloo:
    # The public constructor listens on whatever address the host's name resolves to; connections have no
    # authentication, so they stay on loopback.
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its name at run time
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = patience
    return distributed.ProcessGroupGloo(store, shard.rank, shard.size, options)
