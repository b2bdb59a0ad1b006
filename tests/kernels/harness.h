// Reads launches from standard input, runs them under the emulation, answers with the buffers that were written.
//
// A launch: u32 length and text of the name; u32 grid[3], block[3]; u64 shared bytes, seed; u32 number of arguments;
// each: u32 kind (0 scalar, 1 buffer read, 2 buffer written, 3 null pointer), u64 size, its bytes. An answer: u32
// number of worst bank conflicts, each u32 length, text, u32 width, u32 extra passes; then the written buffers.
#pragma once

#include "emulation.h"

#include <tuple>
#include <unistd.h>

namespace harness {

struct Kernel {
    void (*call)(void* function, void* const* arguments);
    void* function;
    size_t arguments;
};

template <typename... A, size_t... I>
void spread(void (*function)(A...), void* const* arguments, std::index_sequence<I...>) {
    function(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <typename... A>
Kernel kernel(void (*function)(A...)) {
    return {[](void* f, void* const* arguments) {
                spread(reinterpret_cast<void (*)(A...)>(f), arguments, std::index_sequence_for<A...>());
            },
            reinterpret_cast<void*>(function), sizeof...(A)};
}

inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

inline bool read_all(void* to, size_t bytes) {
    auto* at = static_cast<char*>(to);
    while (bytes) {
        const ssize_t got = read(0, at, bytes);
        if (got <= 0) return false;
        at += got;
        bytes -= got;
    }
    return true;
}

template <typename T>
T take() {
    T value;
    if (!read_all(&value, sizeof(T))) emulation::fail("a launch ends early");
    return value;
}

inline void give(const void* from, size_t bytes) {
    const auto* at = static_cast<const char*>(from);
    while (bytes) {
        const ssize_t gone = write(1, at, bytes);
        if (gone <= 0) std::_Exit(71);
        at += gone;
        bytes -= gone;
    }
}

inline void give_u32(size_t value) {
    const auto word = static_cast<uint32_t>(value);
    give(&word, 4);
}

struct Held {
    uint32_t kind;
    size_t bytes;
    void* memory;   // exactly as long as the buffer, so that the address sanitizer sees its end
    void* pointer;  // what a pointer argument is read from
};

struct Call {
    const Kernel* kernel;
    std::vector<void*> arguments;
};

inline void run_one(const std::string& name) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) emulation::fail("no kernel " + name);
    emulation::Launch launch;
    auto take_dim = [] {
        const auto x = take<uint32_t>(), y = take<uint32_t>(), z = take<uint32_t>();
        return dim3(x, y, z);
    };
    launch.grid = take_dim();
    launch.block_dim = take_dim();
    launch.shared_bytes = take<uint64_t>();
    launch.seed = take<uint64_t>();
    std::vector<Held> held(take<uint32_t>());
    if (held.size() != found->second.arguments) {
        emulation::fail(name + " takes " + std::to_string(found->second.arguments) + " arguments, got " +
                        std::to_string(held.size()));
    }
    Call call{&found->second, {}};
    for (auto& one : held) {
        one.kind = take<uint32_t>();
        one.bytes = take<uint64_t>();
        one.memory = nullptr;
        if (one.kind != 3) {
            if (posix_memalign(&one.memory, 128, std::max<size_t>(one.bytes, 1))) emulation::fail("no memory");
            if (!read_all(one.memory, one.bytes)) emulation::fail("a launch ends early");
        }
        one.pointer = one.memory;
        call.arguments.push_back(one.kind == 0 ? one.memory : static_cast<void*>(&one.pointer));
    }
    const auto conflicts = emulation::launch(
        launch,
        [](void* argument) {
            auto* it = static_cast<Call*>(argument);
            it->kernel->call(it->kernel->function, it->arguments.data());
        },
        &call);
    give_u32(conflicts.size());
    for (const auto& [what, passes] : conflicts) {
        give_u32(what.first.size());
        give(what.first.data(), what.first.size());
        give_u32(what.second);
        give_u32(passes);
    }
    for (auto& one : held) {
        if (one.kind == 2) give(one.memory, one.bytes);
        std::free(one.memory);
    }
}

inline int serve() {
    uint32_t length;
    while (read_all(&length, 4)) {
        std::string name(length, '\0');
        if (!read_all(name.data(), length)) return 1;
        run_one(name);
    }
    return 0;
}

}  // namespace harness
