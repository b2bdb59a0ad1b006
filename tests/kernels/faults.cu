// Kernels with one mistake each, and one without, to show what the emulation finds.
#include "device.cuh"

#ifdef KERNEL_NAME
extern "C" __global__ void KERNEL_NAME(const int* from, int* to, int count) {
    int* shared = reinterpret_cast<int*>(shared_bytes());
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarpThreads;
#if FAULT == 0  // none: each thread hands its number to its neighbour
    shared[thread] = from[thread];
    __syncthreads();
    to[thread] = shared_load<int>(shared + (thread + 1) % count);
#elif FAULT == 1  // no barrier between writing and reading
    shared[thread] = from[thread];
    to[thread] = shared_load<int>(shared + (thread + 1) % count);
#elif FAULT == 2  // half of the threads miss the barrier
    if (thread < count / 2) __syncthreads();
    to[thread] = from[thread];
#elif FAULT == 3  // two barriers take each other's threads
    if (thread < count / 2) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    to[thread] = from[thread];
#elif FAULT == 4  // a shuffle that one lane does not take part in
    int value = from[thread];
    if (lane != 3) value = __shfl_xor_sync(kAllLanes, value, 1);
    to[thread] = value;
#elif FAULT == 5  // an asynchronous copy that is used before it has arrived
    copy_async_16(shared + 4 * thread, from + 4 * thread, true);
    commit_copies();
    to[thread] = shared[4 * thread];
    wait_copies<0>();
#elif FAULT == 6  // an asynchronous copy that is never waited for
    copy_async_16(shared + 4 * thread, from + 4 * thread, true);
    commit_copies();
    to[thread] = lane;
#elif FAULT == 7  // a read behind the end of a buffer
    to[thread] = from[thread + count];
#elif FAULT == 8  // a read behind the end of shared memory
    to[thread] = shared_load<int>(shared + 4 * count);
#elif FAULT == 9  // a copy to an address that is no multiple of 16
    copy_async_16(shared + 4 * thread + 1, from + 4 * thread, true);
    commit_copies();
    wait_copies<0>();
    to[thread] = lane;
#elif FAULT == 10  // signed overflow
    to[thread] = 0x7FFFFFFF - from[0] + 1 + from[thread];
#else  // all lanes read another row of the same bank
    shared[thread * 32 % (4 * count)] = thread;
    __syncwarp();
    const int row = shared_load<int>(shared + thread * 32);
    __syncwarp();
    to[thread] = row;
#endif
}
#endif
