// Runs CUDA kernels of this package on a CPU: one fiber per thread, one block after another.
//
// What a kernel may use is declared here and nothing else: threadIdx, blockIdx, blockDim, gridDim, __syncthreads,
// __syncwarp, full-mask shuffles and ballots, and the emulated forms of the wrappers in device.cuh. The number types
// are those of NVIDIA's own headers, which compile as plain C++.
//
// Found here: barriers and warp operations that not all threads reach, or reach at different places; reads of shared
// memory before it is written (each block starts with NaN in all of it); misaligned 16-byte accesses; asynchronous
// copies used before they are waited for, or overtaken by a later use of their buffer; bank conflicts; with
// -fsanitize, accesses outside buffers and undefined arithmetic. Not found: races that only weak ordering shows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "emulation: %s\n", what.c_str());
    std::fflush(stderr);
    std::_Exit(70);
}

// How fibers take turns and when asynchronous copies happen. Each seed is another legal order of events.
struct Schedule {
    uint64_t state;
    explicit Schedule(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
    uint64_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state;
    }
};

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Access {
    const void* address;
    int bytes;
};

enum class Wait { kReady, kWarp, kBlock, kDone };

struct Thread {
    void* stack_pointer = nullptr;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    char* stack = nullptr;
    void* fake_stack = nullptr;
    int index = 0;
    dim3 thread_idx;
    Wait wait = Wait::kReady;
    int site = 0;               // line of the operation that it waits at
    const char* kind = "";      // name of that operation
    void* operand = nullptr;    // its operand, read and written by the last lane to arrive
    std::vector<std::vector<Copy>> groups;  // committed asynchronous copies, oldest first
    std::vector<Copy> open_group;
    std::vector<Access> accesses;  // shared accesses since the warp last met
};

struct Block {
    dim3 block_idx, block_dim, grid_dim;
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    std::vector<Thread> threads;
    std::vector<int> ready;
    std::vector<int> arrived;  // lanes of each warp at its pending operation
    int at_barrier = 0;
    int done = 0;
    bool copies_are_late = false;
    Schedule schedule{1};
    Thread* current = nullptr;
    void* main_stack_pointer = nullptr;
#if !defined(__x86_64__)
    ucontext_t main_context;
#endif
    void* main_fake_stack = nullptr;
    const void* main_bottom = nullptr;
    size_t main_size = 0;
    void (*body)(void*) = nullptr;
    void* body_argument = nullptr;
    std::map<std::pair<std::string, int>, int> worst_conflict;  // (operation, bytes) -> passes beyond the least
};

inline Block* block = nullptr;

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack, changes stacks, restores those of the other.
extern "C" void kvstore_emulation_switch(void** save, void* to);
asm(R"(
    .text
    .globl kvstore_emulation_switch
    .type kvstore_emulation_switch, @function
kvstore_emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size kvstore_emulation_switch, .-kvstore_emulation_switch
)");
#endif

inline void finish_switch(void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    (void)fake_stack;
#endif
}

inline void switch_to(Thread* from, Thread* to) {
    block->current = to;
#if defined(__SANITIZE_ADDRESS__)
    const bool ends = from != nullptr && from->wait == Wait::kDone;
    void** fake = from ? (ends ? nullptr : &from->fake_stack) : &block->main_fake_stack;
    __sanitizer_start_switch_fiber(fake, to ? to->stack : block->main_bottom, to ? kStackBytes : block->main_size);
#endif
#if defined(__x86_64__)
    kvstore_emulation_switch(from ? &from->stack_pointer : &block->main_stack_pointer,
                             to ? to->stack_pointer : block->main_stack_pointer);
#else
    swapcontext(from ? &from->context : &block->main_context, to ? &to->context : &block->main_context);
#endif
    finish_switch(from ? from->fake_stack : block->main_fake_stack);
}

inline Thread* take_ready() {
    auto& ready = block->ready;
    if (ready.empty()) return nullptr;
    // Mostly the newest, so that the lanes of a warp go together; at times any, so that warps overtake each other.
    size_t place = ready.size() - 1;
    const uint64_t draw = block->schedule.next();
    if (draw % 8 == 0) place = (draw >> 8) % ready.size();
    Thread* thread = &block->threads[ready[place]];
    ready[place] = ready.back();
    ready.pop_back();
    return thread;
}

inline void leave(Thread* self) {
    Thread* next = take_ready();
    if (next == self) {
        block->current = self;
        return;
    }
    switch_to(self, next);  // to the launching stack when nobody is ready
}

inline void make_ready(int index) {
    block->threads[index].wait = Wait::kReady;
    block->ready.push_back(index);
}

inline void wake(int first, int count) {
    if (block->schedule.next() & 1) {
        for (int i = 0; i < count; ++i) make_ready(first + i);
    } else {
        for (int i = count - 1; i >= 0; --i) make_ready(first + i);
    }
}

// ---- shared memory ------------------------------------------------------------------------------------------

inline void check_aligned(const void* address, int bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) {
        fail(std::string(what) + ": address is no multiple of " + std::to_string(bytes));
    }
}

inline void check_shared(const void* address, int bytes, const char* what) {
    const auto* at = static_cast<const unsigned char*>(address);
    if (at < block->shared || at + bytes > block->shared + block->shared_bytes) {
        fail(std::string(what) + ": outside the block's shared memory");
    }
}

// Count passes over the 32 banks for one instruction of a warp, against the fewest possible for distinct words.
inline void count_conflicts(const std::vector<Access>& lanes, const char* kind) {
    const int bytes = lanes[0].bytes;
    const int lanes_per_phase = std::min(kWarp, 128 / bytes);
    for (size_t start = 0; start < lanes.size(); start += lanes_per_phase) {
        std::vector<std::vector<uintptr_t>> banks(32);
        for (size_t lane = start; lane < std::min(lanes.size(), start + lanes_per_phase); ++lane) {
            const auto base = reinterpret_cast<uintptr_t>(lanes[lane].address);
            for (int word = 0; word < std::max(1, bytes / 4); ++word) {
                const uintptr_t at = base / 4 + word;
                auto& bank = banks[at % 32];
                if (std::find(bank.begin(), bank.end(), at) == bank.end()) bank.push_back(at);
            }
        }
        int passes = 0;
        for (auto& bank : banks) passes = std::max(passes, static_cast<int>(bank.size()));
        int& worst = block->worst_conflict[{kind, bytes}];
        worst = std::max(worst, passes - 1);
    }
}

inline void count_warp_accesses(int first) {
    const size_t steps = block->threads[first].accesses.size();
    for (int lane = 1; lane < kWarp; ++lane) {
        // Lanes that took different ways cannot be compared.
        if (block->threads[first + lane].accesses.size() != steps) return;
    }
    std::vector<Access> lanes(kWarp);
    for (size_t step = 0; step < steps; ++step) {
        for (int lane = 0; lane < kWarp; ++lane) lanes[lane] = block->threads[first + lane].accesses[step];
        count_conflicts(lanes, "load");
    }
}

template <typename T>
inline T shared_load(const void* address) {
    check_aligned(address, sizeof(T), "shared load");
    check_shared(address, sizeof(T), "shared load");
    block->current->accesses.push_back({address, static_cast<int>(sizeof(T))});
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}

// ---- meeting points -----------------------------------------------------------------------------------------

// All 32 lanes give an operand; the last to arrive runs `complete` for them all.
inline void meet_warp(const char* kind, int site, void* operand, void (*complete)(Thread* lanes)) {
    Thread* self = block->current;
    const int warp = self->index / kWarp;
    const int first = warp * kWarp;
    self->wait = Wait::kWarp;
    self->kind = kind;
    self->site = site;
    self->operand = operand;
    if (++block->arrived[warp] == kWarp) {
        block->arrived[warp] = 0;
        for (int lane = 0; lane < kWarp; ++lane) {
            const Thread& other = block->threads[first + lane];
            if (other.site != site || std::strcmp(other.kind, kind) != 0) {
                fail(std::string("lanes of a warp meet at ") + kind + " line " + std::to_string(site) + " and " +
                     other.kind + " line " + std::to_string(other.site));
            }
        }
        count_warp_accesses(first);
        for (int lane = 0; lane < kWarp; ++lane) block->threads[first + lane].accesses.clear();
        complete(&block->threads[first]);
        wake(first, kWarp);
    }
    leave(self);
}

inline void meet_block(int site) {
    Thread* self = block->current;
    self->wait = Wait::kBlock;
    self->kind = "__syncthreads";
    self->site = site;
    if (++block->at_barrier == static_cast<int>(block->threads.size())) {
        block->at_barrier = 0;
        for (auto& other : block->threads) {
            if (other.site != site) {
                fail("__syncthreads at line " + std::to_string(site) + " meets one at line " +
                     std::to_string(other.site));
            }
            other.accesses.clear();
        }
        wake(0, static_cast<int>(block->threads.size()));
    }
    leave(self);
}

struct Shuffle {
    uint32_t value, result;
    int source;
};

inline uint32_t shuffle(const char* kind, int site, uint32_t value, int source) {
    Shuffle operand{value, 0, source};
    meet_warp(kind, site, &operand, [](Thread* lanes) {
        for (int lane = 0; lane < kWarp; ++lane) {
            auto* mine = static_cast<Shuffle*>(lanes[lane].operand);
            mine->result = static_cast<Shuffle*>(lanes[mine->source].operand)->value;
        }
    });
    return operand.result;
}

template <typename T>
inline T shuffle_as(const char* kind, int site, unsigned mask, T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    if (mask != 0xFFFFFFFFu) fail(std::string(kind) + ": only the full mask is known");
    uint32_t words[sizeof(T) / 4];
    std::memcpy(words, &value, sizeof(T));
    for (auto& word : words) word = shuffle(kind, site, word, source);
    std::memcpy(&value, words, sizeof(T));
    return value;
}

inline int lane_index() { return block->current->index % kWarp; }

inline unsigned ballot(int site, unsigned mask, bool predicate) {
    if (mask != 0xFFFFFFFFu) fail("ballot: only the full mask is known");
    uint32_t operand = predicate;
    meet_warp("ballot", site, &operand, [](Thread* lanes) {
        uint32_t bits = 0;
        for (int lane = 0; lane < kWarp; ++lane) bits |= *static_cast<uint32_t*>(lanes[lane].operand) << lane;
        for (int lane = 0; lane < kWarp; ++lane) *static_cast<uint32_t*>(lanes[lane].operand) = bits;
    });
    return operand;
}

// ---- asynchronous copies ------------------------------------------------------------------------------------

inline void perform(const Copy& copy) {
    // Each of the 16 bytes is written: those past `bytes` are zero.
    unsigned char staged[16] = {};
    std::memcpy(staged, copy.from, copy.bytes);
    std::memcpy(copy.to, staged, 16);
}

inline void copy_async(void* to, const void* from, int bytes) {
    check_aligned(to, 16, "asynchronous copy");
    check_shared(to, 16, "asynchronous copy");
    if (bytes) check_aligned(from, 16, "asynchronous copy");
    const Copy copy{to, from, bytes};
    if (block->copies_are_late) {
        block->current->open_group.push_back(copy);
    } else {
        perform(copy);
    }
}

inline void commit_copies() {
    Thread* self = block->current;
    self->groups.push_back(std::move(self->open_group));
    self->open_group.clear();
}

inline void wait_copies(int newest_left) {
    auto& groups = block->current->groups;
    while (static_cast<int>(groups.size()) > newest_left) {
        for (const auto& copy : groups.front()) perform(copy);
        groups.erase(groups.begin());
    }
}

// ---- matrix operations --------------------------------------------------------------------------------------

struct LoadMatrix {
    const void* row;
    uint32_t out[4];
};

template <bool kTransposed>
inline void load_matrix_x4(uint32_t (&out)[4], const void* row, int site) {
    check_aligned(row, 16, "ldmatrix");
    check_shared(row, 16, "ldmatrix");
    LoadMatrix operand{row, {}};
    meet_warp(kTransposed ? "ldmatrix.trans" : "ldmatrix", site, &operand, [](Thread* lanes) {
        // Lanes 8m..8m+7 give the rows of matrix m; lane l gets elements 2 (l % 4), +1 of row l / 4.
        std::vector<Access> rows(kWarp);
        uint16_t values[4][8][8];
        for (int lane = 0; lane < kWarp; ++lane) {
            const void* address = static_cast<LoadMatrix*>(lanes[lane].operand)->row;
            rows[lane] = {address, 16};
            std::memcpy(values[lane / 8][lane % 8], address, 16);
        }
        count_conflicts(rows, "ldmatrix");
        for (int lane = 0; lane < kWarp; ++lane) {
            for (int m = 0; m < 4; ++m) {
                const int i = lane / 4, j = 2 * (lane % 4);
                const uint32_t low = kTransposed ? values[m][j][i] : values[m][i][j];
                const uint32_t high = kTransposed ? values[m][j + 1][i] : values[m][i][j + 1];
                static_cast<LoadMatrix*>(lanes[lane].operand)->out[m] = low | high << 16;
            }
        }
    });
    std::memcpy(out, operand.out, sizeof(out));
}

inline float as_float(uint16_t bits, __nv_bfloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
inline float as_float(uint16_t bits, __half) {
    __half value;
    std::memcpy(&value, &bits, 2);
    return __half2float(value);
}

struct Multiply {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

// mma.m16n8k16: a is row-major 16 x 16, b is column-major 16 x 8, c is float 16 x 8 (PTX ISA, 'Matrix fragments').
template <typename T>
inline void multiply_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int site) {
    Multiply operand{c, a, {b0, b1}};
    meet_warp("mma", site, &operand, [](Thread* lanes) {
        float a_full[16][16], b_full[8][16];
        for (int lane = 0; lane < kWarp; ++lane) {
            const auto* mine = static_cast<Multiply*>(lanes[lane].operand);
            const int group = lane / 4, pair = 2 * (lane % 4);
            for (int half = 0; half < 2; ++half) {
                for (int r = 0; r < 4; ++r) {
                    const uint16_t bits = static_cast<uint16_t>(mine->a[r] >> (16 * half));
                    a_full[group + 8 * (r % 2)][pair + half + 8 * (r / 2)] = as_float(bits, T());
                }
                for (int r = 0; r < 2; ++r) {
                    const uint16_t bits = static_cast<uint16_t>(mine->b[r] >> (16 * half));
                    b_full[group][pair + half + 8 * r] = as_float(bits, T());
                }
            }
        }
        for (int lane = 0; lane < kWarp; ++lane) {
            const auto* mine = static_cast<Multiply*>(lanes[lane].operand);
            for (int r = 0; r < 4; ++r) {
                const int row = lane / 4 + 8 * (r / 2), column = 2 * (lane % 4) + r % 2;
                float sum = 0;
                for (int k = 0; k < 16; ++k) sum += a_full[row][k] * b_full[column][k];
                mine->c[r] += sum;
            }
        }
    });
}

// ---- launching ----------------------------------------------------------------------------------------------

[[noreturn]] inline void thread_main() {
    finish_switch(nullptr);
    block->body(block->body_argument);
    Thread* self = block->current;
    for (const auto& group : self->groups) {
        if (!group.empty()) fail("a thread ends with asynchronous copies that it never waited for");
    }
    if (!self->open_group.empty()) fail("a thread ends with asynchronous copies that it never committed");
    self->wait = Wait::kDone;
    ++block->done;
    leave(self);
    fail("a finished thread was resumed");
}

inline void prepare(Thread& thread) {
    thread.groups.clear();
    thread.open_group.clear();
    thread.accesses.clear();
    thread.site = 0;
    thread.kind = "";
    if (!thread.stack) {
        thread.stack = static_cast<char*>(
            mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (thread.stack == MAP_FAILED) fail("no memory for a stack");
    }
#if defined(__x86_64__)
    auto** top = reinterpret_cast<void**>(thread.stack + kStackBytes);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(&thread_main);  // taken by ret; the stack is then 8 off 16, as after a call
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    thread.stack_pointer = top - 8;
#else
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, reinterpret_cast<void (*)()>(&thread_main), 0);
#endif
}

inline void run_block() {
    const int count = static_cast<int>(block->threads.size());
    block->at_barrier = block->done = 0;
    std::fill(block->arrived.begin(), block->arrived.end(), 0);
    block->ready.clear();
    std::memset(block->shared, 0xFF, block->shared_bytes);
    for (auto& thread : block->threads) prepare(thread);
    wake(0, count);
    switch_to(nullptr, take_ready());
    if (block->done == count) return;
    std::string where;
    for (const auto& thread : block->threads) {
        const std::string at = thread.wait == Wait::kDone ? "ended" : std::string(thread.kind) + " line " +
                                                                          std::to_string(thread.site);
        if (where.find(at) == std::string::npos) where += (where.empty() ? "" : ", ") + at;
    }
    fail("threads of a block wait for each other for ever: " + where);
}

struct Launch {
    dim3 grid, block_dim;
    size_t shared_bytes;
    uint64_t seed;
};

inline std::map<std::pair<std::string, int>, int> launch(const Launch& launch, void (*body)(void*), void* argument) {
    const size_t count = static_cast<size_t>(launch.block_dim.x) * launch.block_dim.y * launch.block_dim.z;
    if (count == 0 || count % kWarp || count > 1024) fail("a block needs a multiple of 32 threads, at most 1024");
    static std::vector<Thread> threads;  // keeps the stacks
    Block state;
    block = &state;
    state.schedule = Schedule(launch.seed);
    state.copies_are_late = launch.seed & 1;
    state.block_dim = launch.block_dim;
    state.grid_dim = launch.grid;
    state.body = body;
    state.body_argument = argument;
    state.arrived.resize(count / kWarp);
    state.threads.swap(threads);
    state.threads.resize(std::max(count, state.threads.size()));
    std::vector<Thread> spare(std::make_move_iterator(state.threads.begin() + count),
                              std::make_move_iterator(state.threads.end()));
    state.threads.resize(count);
    for (size_t i = 0; i < count; ++i) {
        const unsigned x = i % launch.block_dim.x, rest = i / launch.block_dim.x;
        state.threads[i].index = static_cast<int>(i);
        state.threads[i].thread_idx = dim3(x, rest % launch.block_dim.y, rest / launch.block_dim.y);
    }
    // Exactly as long as asked for, so that the address sanitizer sees its end.
    void* shared = nullptr;
    if (posix_memalign(&shared, 128, std::max<size_t>(launch.shared_bytes, 1))) fail("no memory");
    state.shared = static_cast<unsigned char*>(shared);
    state.shared_bytes = launch.shared_bytes;
    for (unsigned z = 0; z < launch.grid.z; ++z) {
        for (unsigned y = 0; y < launch.grid.y; ++y) {
            for (unsigned x = 0; x < launch.grid.x; ++x) {
                state.block_idx = dim3(x, y, z);
                run_block();
            }
        }
    }
    std::free(shared);
    for (auto& thread : spare) state.threads.push_back(std::move(thread));
    threads.swap(state.threads);
    block = nullptr;
    return state.worst_conflict;
}

}  // namespace emulation

#define threadIdx (emulation::block->current->thread_idx)
#define blockIdx (emulation::block->block_idx)
#define blockDim (emulation::block->block_dim)
#define gridDim (emulation::block->grid_dim)
#define __syncthreads() emulation::meet_block(__LINE__)
#define __syncwarp() emulation::meet_warp("__syncwarp", __LINE__, nullptr, [](emulation::Thread*) {})
#define __shfl_xor_sync(mask, value, bits) \
    emulation::shuffle_as("shuffle", __LINE__, mask, value, emulation::lane_index() ^ (bits))
#define __shfl_sync(mask, value, lane) emulation::shuffle_as("shuffle", __LINE__, mask, value, (lane) & 31)
#define __shfl_up_sync(mask, value, delta)           \
    emulation::shuffle_as("shuffle", __LINE__, mask, value, \
                          emulation::lane_index() < (delta) ? emulation::lane_index() : emulation::lane_index() - (delta))
#define __ballot_sync(mask, predicate) emulation::ballot(__LINE__, mask, predicate)
#define __ffs(bits) __builtin_ffs(bits)
