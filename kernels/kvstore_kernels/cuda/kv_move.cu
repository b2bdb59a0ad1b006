// Moves KV bytes: new keys and values into page rows, whole pages to and from blocks in the store's layout.
//
// All of these are bound by memory. An access is 16 bytes wide, neighbouring threads touch neighbouring bytes, and a
// thread has kUnroll loads under way before its first store, so that a multiprocessor keeps about 128 KiB in flight.
//
// Builds: -DMOVE_OPERATION=0 copies blocks, 1 converts blocks between a 16-bit and an fp8 kind, 2 writes rows,
// 3 writes rows and quantises them. Kinds and widths as named below.
#include "device.cuh"

#ifndef KVSTORE_KV_MOVE_CU
#define KVSTORE_KV_MOVE_CU

namespace kv_move {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kGroup = 16;  // elements that one thread converts at a time: one 16-byte fp8 access

template <int kBytes>
struct Unit;
template <>
struct Unit<16> {
    typedef uint4 Type;
};
template <>
struct Unit<8> {
    typedef uint2 Type;
};
template <>
struct Unit<4> {
    typedef unsigned int Type;
};
template <>
struct Unit<2> {
    typedef unsigned short Type;
};
template <>
struct Unit<1> {
    typedef unsigned char Type;
};

// Where piece (layer, plane) of one page or block starts. Strides in bytes; a piece itself is contiguous.
struct Pieces {
    i64 item_stride, layer_stride, plane_stride;
    DEVICE i64 offset(i64 item, int layer, int plane) const {
        return item * item_stride + layer * layer_stride + plane * plane_stride;
    }
};

// Copy one chunk of kThreads * kUnroll units of a piece. Blocks of threads: chunk fastest, then piece, then block.
template <int kBytes>
DEVICE void copy_chunk(const u8* from, u8* to, i64 piece_units, i64 first) {
    typedef typename Unit<kBytes>::Type V;
    const V* source = reinterpret_cast<const V*>(from);
    V* target = reinterpret_cast<V*>(to);
    V held[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const i64 at = first + i * kThreads;
        if (at < piece_units) held[i] = load_once(source + at);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const i64 at = first + i * kThreads;
        if (at < piece_units) store_once(target + at, held[i]);
    }
}

struct Chunk {
    i64 item;
    int layer, plane;
    i64 first;  // unit of the piece that thread 0 takes first
};

DEVICE Chunk chunk_of_block(int layers, int planes, int chunks_per_piece) {
    const u32 index = blockIdx.x;
    const u32 piece = index / chunks_per_piece;
    const u32 per_item = layers * planes;
    Chunk chunk;
    chunk.first = static_cast<i64>(index % chunks_per_piece) * (kThreads * kUnroll);
    chunk.item = piece / per_item;
    chunk.layer = static_cast<int>(piece % per_item / planes);
    chunk.plane = static_cast<int>(piece % planes);
    return chunk;
}

// Sixteen numbers of 16 bits, two 16-byte accesses.
template <typename T>
struct Group {
    uint4 half[2];
};

template <typename T>
DEVICE Group<T> load_group(const u8* address) {
    Group<T> group;
    const uint4* at = reinterpret_cast<const uint4*>(address);
    group.half[0] = load_once(at);
    group.half[1] = load_once(at + 1);
    return group;
}

template <typename T, int kFp8>
DEVICE u32 quantise_four(u32 first, u32 second, float inverse) {
    const float2 a = unpack<T>(first);
    const float2 b = unpack<T>(second);
    return floats_to_fp8_pair<kFp8>(a.x * inverse, a.y * inverse) |
           floats_to_fp8_pair<kFp8>(b.x * inverse, b.y * inverse) << 16;
}

template <typename T, int kFp8>
DEVICE uint4 quantise_group(const Group<T>& group, float inverse) {
    uint4 out;
    out.x = quantise_four<T, kFp8>(group.half[0].x, group.half[0].y, inverse);
    out.y = quantise_four<T, kFp8>(group.half[0].z, group.half[0].w, inverse);
    out.z = quantise_four<T, kFp8>(group.half[1].x, group.half[1].y, inverse);
    out.w = quantise_four<T, kFp8>(group.half[1].z, group.half[1].w, inverse);
    return out;
}

template <typename T, int kFp8>
DEVICE u32 dequantise_pair(u32 pair, float scale) {
    const float2 value = unpack<__half>(fp8_pair_to_half2<kFp8>(pair & 0xFFFF));
    return pack<T>(value.x * scale, value.y * scale);
}

template <typename T, int kFp8>
DEVICE Group<T> dequantise_group(uint4 packed, float scale) {
    Group<T> out;
    out.half[0] = make_uint4(dequantise_pair<T, kFp8>(packed.x, scale), dequantise_pair<T, kFp8>(packed.x >> 16, scale),
                             dequantise_pair<T, kFp8>(packed.y, scale), dequantise_pair<T, kFp8>(packed.y >> 16, scale));
    out.half[1] = make_uint4(dequantise_pair<T, kFp8>(packed.z, scale), dequantise_pair<T, kFp8>(packed.z >> 16, scale),
                             dequantise_pair<T, kFp8>(packed.w, scale), dequantise_pair<T, kFp8>(packed.w >> 16, scale));
    return out;
}

// Offset in bytes of group `group` of one token's keys, whose heads are `head_stride` bytes apart.
DEVICE i64 group_offset(int group, int groups_per_head, i64 head_stride, int group_bytes) {
    const int head = group / groups_per_head;
    return head * head_stride + static_cast<i64>(group - head * groups_per_head) * group_bytes;
}

}  // namespace kv_move
#endif

#ifdef KERNEL_NAME
#if MOVE_OPERATION == 0
// Copy `count` items from `from` to `to`: item i is number from_items[i] there and to_items[i] here (null: i itself).
extern "C" __global__ void __launch_bounds__(kv_move::kThreads)
    KERNEL_NAME(const u8* from, u8* to, const i64* from_items, const i64* to_items, int layers, int planes,
                i64 piece_bytes, int chunks_per_piece, i64 from_item_stride, i64 from_layer_stride,
                i64 from_plane_stride, i64 to_item_stride, i64 to_layer_stride, i64 to_plane_stride) {
    using namespace kv_move;
    const Chunk chunk = chunk_of_block(layers, planes, chunks_per_piece);
    const Pieces source{from_item_stride, from_layer_stride, from_plane_stride};
    const Pieces target{to_item_stride, to_layer_stride, to_plane_stride};
    const i64 from_item = from_items ? from_items[chunk.item] : chunk.item;
    const i64 to_item = to_items ? to_items[chunk.item] : chunk.item;
    copy_chunk<UNIT_BYTES>(from + source.offset(from_item, chunk.layer, chunk.plane),
                           to + target.offset(to_item, chunk.layer, chunk.plane), piece_bytes / UNIT_BYTES,
                           chunk.first + threadIdx.x);
}

#elif MOVE_OPERATION == 1
// As above, from FROM_KIND to TO_KIND, of which one is fp8. scales [layers, planes, heads]: value = fp8 * scale.
extern "C" __global__ void __launch_bounds__(kv_move::kThreads)
    KERNEL_NAME(const u8* from, u8* to, const i64* from_items, const i64* to_items, const float* scales, int layers,
                int planes, int heads, int groups_per_head, int piece_groups, int chunks_per_piece,
                i64 from_item_stride, i64 from_layer_stride, i64 from_plane_stride, i64 to_item_stride,
                i64 to_layer_stride, i64 to_plane_stride) {
    using namespace kv_move;
    const Chunk chunk = chunk_of_block(layers, planes, chunks_per_piece);
    const Pieces source{from_item_stride, from_layer_stride, from_plane_stride};
    const Pieces target{to_item_stride, to_layer_stride, to_plane_stride};
    const i64 from_item = from_items ? from_items[chunk.item] : chunk.item;
    const i64 to_item = to_items ? to_items[chunk.item] : chunk.item;
    const u8* from_piece = from + source.offset(from_item, chunk.layer, chunk.plane);
    u8* to_piece = to + target.offset(to_item, chunk.layer, chunk.plane);
    const float* piece_scales = scales + (static_cast<i64>(chunk.layer) * planes + chunk.plane) * heads;
    const int first = static_cast<int>(chunk.first) + static_cast<int>(threadIdx.x);
#if FROM_KIND <= 1
    Group<Element<FROM_KIND>::Type> held[kUnroll];
#else
    uint4 held[kUnroll];
#endif
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const i64 group = first + i * kThreads;
        if (group >= piece_groups) continue;
#if FROM_KIND <= 1
        held[i] = load_group<Element<FROM_KIND>::Type>(from_piece + group * (2 * kGroup));
#else
        held[i] = load_once(reinterpret_cast<const uint4*>(from_piece) + group);
#endif
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const int group = first + i * kThreads;
        if (group >= piece_groups) continue;
        const float scale = piece_scales[group / groups_per_head % heads];
#if FROM_KIND <= 1
        store_once(reinterpret_cast<uint4*>(to_piece) + group,
                   quantise_group<Element<FROM_KIND>::Type, TO_KIND>(held[i], 1.0f / scale));
#else
        const auto values = dequantise_group<Element<TO_KIND>::Type, FROM_KIND>(held[i], scale);
        uint4* halves = reinterpret_cast<uint4*>(to_piece + static_cast<i64>(group) * (2 * kGroup));
        store_once(halves, values.half[0]);
        store_once(halves + 1, values.half[1]);
#endif
    }
}

#else
// Write keys and values [tokens, heads, head_dim] of one layer into page rows. slots[t] = page * block_tokens + row;
// a negative slot is skipped. One thread per unit of UNIT_BYTES (or group of 16 numbers), keys and then values.
extern "C" __global__ void __launch_bounds__(kv_move::kThreads)
    KERNEL_NAME(const u8* keys, const u8* values, u8* pages, const i64* slots, const float* scales, int tokens,
                int heads, int units_per_head, int block_tokens, i64 key_token_stride, i64 value_token_stride,
                i64 key_head_stride, i64 value_head_stride, i64 page_stride, i64 plane_stride, i64 row_stride,
                i64 head_stride) {
    using namespace kv_move;
    const u32 units = heads * units_per_head;
    const u32 index = blockIdx.x * kThreads + threadIdx.x;
    const int unit = static_cast<int>(index % units);
    const u32 row = index / units;
    const i64 token = row >> 1;
    const int plane = static_cast<int>(row & 1);
    if (token >= tokens) return;
    const i64 slot = slots[token];
    if (slot < 0) return;
    const i64 page = slot / block_tokens;
    const u8* source = plane ? values + token * value_token_stride : keys + token * key_token_stride;
    const i64 source_head_stride = plane ? value_head_stride : key_head_stride;
    u8* target = pages + page * page_stride + plane * plane_stride + (slot - page * block_tokens) * row_stride;
#if MOVE_OPERATION == 2
    typedef Unit<UNIT_BYTES>::Type V;
    const i64 from = group_offset(unit, units_per_head, source_head_stride, UNIT_BYTES);
    const i64 to = group_offset(unit, units_per_head, head_stride, UNIT_BYTES);
    *reinterpret_cast<V*>(target + to) = load_once(reinterpret_cast<const V*>(source + from));
#else
    typedef Element<FROM_KIND>::Type T;
    const float scale = scales[plane * heads + unit / units_per_head];
    const Group<T> group = load_group<T>(source + group_offset(unit, units_per_head, source_head_stride, 2 * kGroup));
    const i64 to = group_offset(unit, units_per_head, head_stride, kGroup);
    *reinterpret_cast<uint4*>(target + to) = quantise_group<T, TO_KIND>(group, 1.0f / scale);
#endif
}
#endif
#endif
