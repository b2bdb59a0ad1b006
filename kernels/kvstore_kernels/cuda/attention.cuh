// Shared by the attention kernels: how rows lie in shared memory, how cached tokens are found, and the arithmetic of
// the running softmax. Fragment layouts are those of the PTX ISA for mma.m16n8k16 and ldmatrix.
#ifndef KVSTORE_ATTENTION_CUH
#define KVSTORE_ATTENTION_CUH

#include "device.cuh"

constexpr int kChunk = 16;  // bytes of one access

template <bool kIf, typename A, typename B>
struct Choose {
    typedef A Type;
};
template <typename A, typename B>
struct Choose<false, A, B> {
    typedef B Type;
};

// Rows of kBytes in shared memory, in chunks of 16 bytes. The stride is an odd number of chunks, so that the same chunk
// of 8 neighbouring rows, and two chunks of 4 even rows, lie in different groups of 4 banks. (Exchanging chunks within
// rows does the same without padding, but takes registers for addresses that are no constant distance apart.)
template <int kBytes>
struct Rows {
    static constexpr int kStride = (kBytes / kChunk | 1) * kChunk;
    static_assert(kBytes % kChunk == 0, "rows are whole chunks");

    static DEVICE int offset(int row, int chunk) { return row * kStride + chunk * kChunk; }
};

// One layer's pages. Strides in bytes.
struct Pages {
    const u8* base;
    i64 page_stride, plane_stride, row_stride, head_stride;
    int block_tokens, num_pages;
};

// One sequence's cached tokens.
struct Context {
    const int* table;
    int length;       // cached tokens
    bool is_invalid;  // longer than its table
};

DEVICE Context context_of(const int* block_tables, const int* context_lens, int sequence, int max_blocks,
                          int block_tokens) {
    Context context;
    context.table = block_tables + static_cast<i64>(sequence) * max_blocks;
    context.length = context_lens[sequence];
    const i64 room = static_cast<i64>(max_blocks) * block_tokens;
    context.is_invalid = context.length > room || context.length < 0;
    if (context.is_invalid) context.length = 0;
    return context;
}

constexpr int kNoToken = -1;  // a position behind the end: its row is zeros
constexpr int kBadPage = -2;  // a slot outside the pages: the result is NaN

// Slot of the page that holds a position. Reads global memory; what it returns is for row_offset a while later.
DEVICE int look_up(const Context& context, const Pages& pages, int position, int end) {
    if (position >= end) return kNoToken;
    const int page = context.table[static_cast<u32>(position) / pages.block_tokens];
    return static_cast<u32>(page) < static_cast<u32>(pages.num_pages) ? page : kBadPage;
}

// Byte offset of a position's row from the start of the pages, negative if there is none.
DEVICE i64 row_offset(const Pages& pages, int page, int position) {
    if (page < 0) return -1;
    return page * pages.page_stride + static_cast<u32>(position) % pages.block_tokens * pages.row_stride;
}

DEVICE float quad_max(float value) {
    value = larger(value, __shfl_xor_sync(kAllLanes, value, 1));
    return larger(value, __shfl_xor_sync(kAllLanes, value, 2));
}

DEVICE float quad_sum(float value) {
    value += __shfl_xor_sync(kAllLanes, value, 1);
    return value + __shfl_xor_sync(kAllLanes, value, 2);
}

DEVICE float not_a_number() { return float_from_bits(0x7FC00000u); }

// fp8 keys meet fp16 queries, whose range is smaller than bfloat16's: a power of two that brings the largest magnitude
// of some rows into [1, 2), and its inverse. It is 1 where the range suffices as it is, so that what one row gets does
// not depend on others; and where there is no such power (0, infinity, NaN).
struct RowFactor {
    float down, up;
};

DEVICE RowFactor row_factor(float largest) {
    const u32 exponent = bits_from_float(largest) & 0x7F800000u;
    const bool is_in_range = exponent >= 0x3B800000u && exponent <= 0x47000000u;  // 2^-8 to below 2^16
    if (is_in_range || exponent == 0 || exponent >= 0x7F000000u) return {1.0f, 1.0f};
    RowFactor factor;
    factor.down = float_from_bits(0x7F000000u - exponent);
    factor.up = float_from_bits(exponent);
    return factor;
}

// What scores are multiplied by; never 0, which would turn the minus infinity of a hidden column into NaN.
DEVICE float score_factor(float factor) { return larger(factor, 1.2e-38f); }

// The running softmax of one row over columns that this lane and its quad hold: largest score, own share of the sum.
struct RunningRow {
    float largest, sum;
};

// Take in this lane's scores (already times the scale, base 2): they become weights. Returns the factor by which
// what was accumulated before must shrink. kColumns scores at stride 4 in `scores`, two each, from `first`.
template <int kTiles>
DEVICE float take_scores(RunningRow& row, float (&scores)[kTiles][4], int first, float factor) {
    float largest = negative_infinity();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        largest = larger(largest, larger(scores[tile][first], scores[tile][first + 1]));
    }
    largest = larger(row.largest, quad_max(largest) * factor);
    // A row that has seen no key yet keeps weights of zero.
    const float base = largest == negative_infinity() ? 0.0f : largest;
    const float shrink = exp2_fast(row.largest - base);
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = first; i < first + 2; ++i) {
            scores[tile][i] = exp2_fast(scores[tile][i] * factor - base);
            sum += scores[tile][i];
        }
    }
    row.largest = largest;
    row.sum = row.sum * shrink + sum;
    return shrink;
}

// Weights of 16 columns as the left operand of the product with values.
template <typename T, int kTiles>
DEVICE void weights_as_operand(u32 (&out)[4], const float (&weights)[kTiles][4], int step) {
    out[0] = pack<T>(weights[2 * step][0], weights[2 * step][1]);
    out[1] = pack<T>(weights[2 * step][2], weights[2 * step][3]);
    out[2] = pack<T>(weights[2 * step + 1][0], weights[2 * step + 1][1]);
    out[3] = pack<T>(weights[2 * step + 1][2], weights[2 * step + 1][3]);
}

#endif
