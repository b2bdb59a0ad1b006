"""CpuTieringSpec: lets vLLM's OffloadingConnector run on CPUs, where its own copies refuse to.

Only the copies between the engine's cache and vLLM's CPU cache are of the test; the scheduler, the tiers'
manager and the shared memory are vLLM's. Loaded by ``spec_module_path`` in the engine's process.
"""

import time

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies in the calling thread, block by block."""

    def __init__(self, kv_caches: object, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._here, self._there = [], []
        for one in kv_caches.tensors:
            size = one.page_size_bytes
            self._here.append(one.tensor.reshape(-1, size))
            view = region.create_next_worker_view(size * blocks_per_chunk)
            self._there.append([view[:, at * size : (at + 1) * size] for at in range(blocks_per_chunk)])
        self._done = []

    def submit_store(self, job_id: int, src_spec: object, dst_spec: object) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: object, dst_spec: object) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_load=True)

    def _copy(self, job_id: int, blocks: object, chunks: object, *, is_load: bool) -> bool:
        began_s, size_bytes, every = time.monotonic(), 0, self._blocks_per_chunk
        at_block = at_chunk = 0
        for group, count in enumerate(blocks.group_sizes):
            skipped = int(blocks.block_indices[group]) % every if count else 0
            for at in range(int(count)):
                block = int(blocks.block_ids[at_block + at])
                chunk = int(chunks.block_ids[at_chunk + (skipped + at) // every])
                for ref in self._refs[group]:
                    here = self._here[ref.tensor_idx][block]
                    there = self._there[ref.tensor_idx][(skipped + at) % every][chunk]
                    (here if is_load else there).copy_(there if is_load else here)
                    size_bytes += ref.page_size_bytes
            at_block += int(count)
            at_chunk += -(-(skipped + int(count)) // every)
        self._done.append(TransferResult(job_id, True, size_bytes, time.monotonic() - began_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._there, self._here = [], []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with that worker."""

    def get_worker(self, kv_caches: object) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
