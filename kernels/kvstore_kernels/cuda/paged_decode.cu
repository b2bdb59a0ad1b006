// Attention of one new token per sequence over its cached tokens.
//
// Bound by memory, so built around keeping loads under way. A block of threads takes one KV head of one sequence (up
// to 16 of its query heads, which are the rows of the matrix products) and one split of the context. Each warp works
// alone on every kWarps-th run of kTokens positions: it keeps kStages - 1 runs of keys and values under way by
// cp.async in its own ring of shared memory, and meets the other warps only at the end, when their sums are joined.
// The slots of the run after the next are read from the block table one run ahead.
//
//   positions of a split:  | warp 0 | warp 1 | warp 2 | warp 3 | warp 0 | ...     kTokens each
//
// With fp8 pages the bytes stay fp8 in shared memory and become fp16 in registers, in a fragment whose columns are
// permuted so that a lane needs 4 neighbouring bytes; queries are permuted alike, results put back at the end.
//
// Builds: -DQUERY_KIND, -DKV_KIND (see device.cuh), -DHEAD_DIM, -DSTAGES, -DSHARED_BYTES.
#include "attention.cuh"

#ifndef KVSTORE_PAGED_DECODE_CU
#define KVSTORE_PAGED_DECODE_CU

namespace paged_decode {

constexpr int kRows = 16;  // query heads of one block of threads

struct Arguments {
    const u8* queries;
    u8* out;
    Pages pages;
    const int* block_tables;
    const int* context_lens;
    const float* scales;  // [2, kv_heads] or null
    float* partial_out;   // [sequences * heads, splits, head_dim]
    float* partial_lse;   // [sequences * heads, splits], base 2
    i64 query_token_stride, query_head_stride, out_token_stride, out_head_stride;  // bytes
    int kv_heads, group, max_blocks, split_tokens, splits;
    float scale_log2;
};

template <int kQueryKind, int kKvKind, int kHeadDim, int kStages, int kAskedBytes>
struct Decode {
    typedef typename Element<kQueryKind>::Type Query;
    static constexpr bool kIsFp8 = is_fp8(kKvKind);
    typedef typename Choose<kIsFp8, __half, Query>::Type Compute;
    static constexpr int kDim = ceil_div(kHeadDim, 32) * 32;
    static constexpr int kRowBytes = kDim * bytes_of(kKvKind);
    static constexpr int kRowChunks = kHeadDim * bytes_of(kKvKind) / kChunk;
    static constexpr int kWarps = kRowBytes > 256 ? 2 : 4;
    static constexpr int kThreads = kWarps * kWarpThreads;
    static constexpr int kTokens = kRowBytes > 128 ? 16 : 32;
    static constexpr int kTables = ceil_div(kTokens, kWarpThreads);  // slots that one lane holds
    typedef Rows<kRowBytes> KvRows;
    typedef Rows<kDim * 2> QueryRows;
    static constexpr int kPlaneBytes = kTokens * KvRows::kStride;
    static constexpr int kStageBytes = 2 * kPlaneBytes;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kQueryBytes = kRows * QueryRows::kStride;
    static constexpr int kJoinStride = kDim + 4;
    static constexpr int kSteps = kDim / 16;
    static constexpr int kScoreTiles = kTokens / 8;
    static constexpr int kOutTiles = kDim / 8;
    static constexpr bool kHoldsQueries = kDim <= 128;  // in registers; else read again from shared memory
    static_assert(kStages >= 2, "one run is loaded while another is used");
    static_assert(kHeadDim * bytes_of(kKvKind) % kChunk == 0, "rows are whole chunks");

    // Shared memory: queries, their factors, then the rings; the rings' place holds the warps' sums at the end.
    static constexpr int kFactors = kQueryBytes;
    static constexpr int kRings = kFactors + 2 * kRows * 4;
    static constexpr int kJoinBytes = kWarps * kRows * (kJoinStride + 2) * 4;

    const Arguments& a;
    const int lane, warp, kv_head, row_block, split, sequence;
    Context context;
    int begin, end;
    bool is_bad;
    u8* ring;

    DEVICE Decode(const Arguments& arguments)
        : a(arguments),
          lane(threadIdx.x % kWarpThreads),
          warp(threadIdx.x / kWarpThreads),
          kv_head(blockIdx.x % arguments.kv_heads),
          row_block(blockIdx.x / arguments.kv_heads),
          split(blockIdx.y),
          sequence(blockIdx.z) {
        context = context_of(a.block_tables, a.context_lens, sequence, a.max_blocks, a.pages.block_tokens);
        is_bad = context.is_invalid;
        const i64 first = static_cast<i64>(split) * a.split_tokens;
        begin = static_cast<int>(smaller<i64>(first, context.length));
        end = static_cast<int>(smaller<i64>(first + a.split_tokens, context.length));
        ring = shared_bytes() + kRings + warp * kWarpBytes;
    }

    DEVICE int rows() const { return smaller(kRows, a.group - row_block * kRows); }
    DEVICE int first_head() const { return kv_head * a.group + row_block * kRows; }

    // ---- queries ----

    // Each row by kThreads / kRows neighbouring threads, rows behind the last one zeros.
    DEVICE void load_queries() {
        constexpr int kPerRow = kThreads / kRows;
        const int row = threadIdx.x / kPerRow, part = threadIdx.x % kPerRow;
        const u32* source = reinterpret_cast<const u32*>(a.queries + sequence * a.query_token_stride +
                                                         (first_head() + row) * a.query_head_stride);
        const bool is_row = row < rows();
        float largest = 0.0f;
        if constexpr (kIsFp8) {
            for (int pair = part; is_row && pair < kHeadDim / 2; pair += kPerRow) {
                const float2 value = unpack<Query>(source[pair]);
                largest = larger(largest, larger(fabsf(value.x), fabsf(value.y)));
            }
#pragma unroll
            for (int bits = 1; bits < kPerRow; bits *= 2) {
                largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, bits));
            }
        }
        const RowFactor factor = row_factor(largest);
        for (int pair = part; pair < kDim / 2; pair += kPerRow) {
            u32 bits = is_row && pair < kHeadDim / 2 ? source[pair] : 0;
            if constexpr (kIsFp8) {
                const float2 value = unpack<Query>(bits);
                bits = pack<Compute>(value.x * factor.down, value.y * factor.down);
            }
            *reinterpret_cast<u32*>(shared_bytes() + QueryRows::offset(row, pair / 4) + pair % 4 * 4) = bits;
        }
        if (part == 0) reinterpret_cast<float*>(shared_bytes() + kFactors)[row] = factor.up;
    }

    DEVICE void query_operand(u32 (&out)[4], int step) const {
        const u8* queries = shared_bytes();
        if constexpr (kIsFp8) {
            const int row = lane / 4, byte = lane % 4 * 8;
            const int at = 2 * step + byte / kChunk;
            const uint2 low = shared_load<uint2>(queries + QueryRows::offset(row, at) + byte % kChunk);
            const uint2 high = shared_load<uint2>(queries + QueryRows::offset(row + 8, at) + byte % kChunk);
            out[0] = low.x;
            out[1] = high.x;
            out[2] = low.y;
            out[3] = high.y;
        } else {
            load_matrix_x4(out, queries + QueryRows::offset(lane % 16, 2 * step + lane / 16));
        }
    }

    // ---- keys and values ----

    DEVICE int first_position(int run) const { return begin + (run * kWarps + warp) * kTokens; }

    DEVICE int num_runs() const {
        const int all = (end - begin + kTokens - 1) / kTokens;
        return all > warp ? (all - warp + kWarps - 1) / kWarps : 0;
    }

    DEVICE void look_up_run(int (&slots)[kTables], int run) const {
#pragma unroll
        for (int i = 0; i < kTables; ++i) {
            const int token = lane + i * kWarpThreads;
            slots[i] = token < kTokens ? look_up(context, a.pages, first_position(run) + token, end) : kNoToken;
        }
    }

    // Start to load a run whose slots were looked up; lanes hold the rows' offsets for each other.
    DEVICE void start_run(const int (&slots)[kTables], int run) {
        i64 offsets[kTables];
#pragma unroll
        for (int i = 0; i < kTables; ++i) {
            is_bad |= slots[i] == kBadPage;
            offsets[i] = row_offset(a.pages, slots[i], first_position(run) + lane + i * kWarpThreads);
        }
        u8* keys = ring + run % kStages * kStageBytes;
        const u8* head = a.pages.base + kv_head * a.pages.head_stride;
#pragma unroll
        for (int i = 0; i < ceil_div(kTokens * kRowChunks, kWarpThreads); ++i) {
            const int index = i * kWarpThreads + lane;
            const int row = index / kRowChunks, chunk = index % kRowChunks;
            i64 offset = __shfl_sync(kAllLanes, offsets[0], row % kWarpThreads);
            if constexpr (kTables > 1) {
                const i64 other = __shfl_sync(kAllLanes, offsets[1], row % kWarpThreads);
                if (row >= kWarpThreads) offset = other;
            }
            if (row < kTokens) {
                const bool is_token = offset >= 0;
                const u8* from = head + (is_token ? offset : 0) + chunk * kChunk;
                u8* to = keys + KvRows::offset(row, chunk);
                copy_async_16(to, from, is_token);
                copy_async_16(to + kPlaneBytes, from + a.pages.plane_stride, is_token);
            }
        }
    }

    // Columns between the head's own and the padded size are never loaded, and must not be NaN.
    DEVICE void clear_padding() {
        if constexpr (kHeadDim != kDim) {
            for (int at = lane * kChunk; at < kWarpBytes; at += kWarpThreads * kChunk) {
                *reinterpret_cast<uint4*>(ring + at) = make_uint4(0, 0, 0, 0);
            }
            __syncwarp();
        }
    }

    DEVICE void add_scores(float (&scores)[kScoreTiles][4], const u32 (&query)[4], const u8* keys, int step) const {
#pragma unroll
        for (int tile = 0; tile < kScoreTiles; ++tile) {
            if constexpr (kIsFp8) {
                const int row = tile * 8 + lane / 4;
                const u32 four = shared_load<u32>(keys + KvRows::offset(row, step) + lane % 4 * 4);
                multiply_add<Compute>(scores[tile], query, fp8_pair_to_half2<kKvKind>(four & 0xFFFF),
                                      fp8_pair_to_half2<kKvKind>(four >> 16));
            } else if (tile % 2 == 0) {
                u32 operand[4];
                const int row = tile * 8 + lane / 16 * 8 + lane % 8;
                load_matrix_x4(operand, keys + KvRows::offset(row, 2 * step + lane / 8 % 2));
                multiply_add<Compute>(scores[tile], query, operand[0], operand[1]);
                multiply_add<Compute>(scores[tile + 1], query, operand[2], operand[3]);
            }
        }
    }

    DEVICE void add_values(float (&sums)[kOutTiles][4], const u32 (&weights)[4], const u8* values, int step) const {
        if constexpr (kIsFp8) {
            const int column = lane / 4, token = step * 16 + lane % 4 * 2;
#pragma unroll
            for (int four = 0; four < kDim / 32; ++four) {
                u32 bytes[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = token + i % 2 + i / 2 * 8;
                    bytes[i] = shared_load<u32>(values + KvRows::offset(row, 2 * four + column / 4) + column % 4 * 4);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u32 selector = half ? 0x7362 : 0x5140;
                    const u32 low = permute_bytes(bytes[0], bytes[1], selector);
                    const u32 high = permute_bytes(bytes[2], bytes[3], selector);
                    multiply_add<Compute>(sums[four * 4 + half * 2], weights, fp8_pair_to_half2<kKvKind>(low & 0xFFFF),
                                          fp8_pair_to_half2<kKvKind>(high & 0xFFFF));
                    multiply_add<Compute>(sums[four * 4 + half * 2 + 1], weights,
                                          fp8_pair_to_half2<kKvKind>(low >> 16), fp8_pair_to_half2<kKvKind>(high >> 16));
                }
            }
        } else {
#pragma unroll
            for (int pair = 0; pair < kDim / 16; ++pair) {
                u32 operand[4];
                load_matrix_x4_transposed(operand, values + KvRows::offset(step * 16 + lane % 16, 2 * pair + lane / 16));
                multiply_add<Compute>(sums[2 * pair], weights, operand[0], operand[1]);
                multiply_add<Compute>(sums[2 * pair + 1], weights, operand[2], operand[3]);
            }
        }
    }

    // Dimension that column `column` of output tile `tile` stands for.
    static DEVICE int dimension(int tile, int column) {
        return kIsFp8 ? tile / 4 * 32 + column * 4 + tile % 4 : tile * 8 + column;
    }

    // ---- the whole ----

    DEVICE void hide_behind_end(float (&scores)[kScoreTiles][4], int first) const {
        if (first + kTokens <= end) return;
#pragma unroll
        for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + tile * 8 + lane % 4 * 2 + i % 2 >= end) scores[tile][i] = negative_infinity();
            }
        }
    }

    DEVICE void use_run(float (&sums)[kOutTiles][4], RunningRow (&state)[2], const float (&factors)[2],
                        const u32 (&held)[kHoldsQueries ? kSteps : 1][4], int run) const {
        const u8* keys = ring + run % kStages * kStageBytes;
        float scores[kScoreTiles][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if constexpr (kHoldsQueries) {
                add_scores(scores, held[step], keys, step);
            } else {
                u32 query[4];
                query_operand(query, step);
                add_scores(scores, query, keys, step);
            }
        }
        hide_behind_end(scores, first_position(run));
        const float shrink_low = take_scores(state[0], scores, 0, factors[0]);
        const float shrink_high = take_scores(state[1], scores, 2, factors[1]);
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
            sums[tile][0] *= shrink_low;
            sums[tile][1] *= shrink_low;
            sums[tile][2] *= shrink_high;
            sums[tile][3] *= shrink_high;
        }
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step) {
            u32 weights[4];
            weights_as_operand<Compute>(weights, scores, step);
            add_values(sums, weights, keys + kPlaneBytes, step);
        }
    }

    DEVICE void run() {
        const int runs = num_runs();
        int slots[kTables];
        clear_padding();
        look_up_run(slots, 0);
#pragma unroll
        for (int ahead = 0; ahead < kStages - 1; ++ahead) {
            int next[kTables];
            look_up_run(next, ahead + 1);
            if (ahead < runs) start_run(slots, ahead);
            commit_copies();
#pragma unroll
            for (int i = 0; i < kTables; ++i) slots[i] = next[i];
        }
        load_queries();
        __syncthreads();

        u32 held[kHoldsQueries ? kSteps : 1][4];
        if constexpr (kHoldsQueries) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) query_operand(held[step], step);
        }
        const float* ups = reinterpret_cast<const float*>(shared_bytes() + kFactors);
        const float scale = a.scale_log2 * (a.scales ? a.scales[kv_head] : 1.0f);
        const float factors[2] = {score_factor(kIsFp8 ? scale * ups[lane / 4] : scale),
                                  score_factor(kIsFp8 ? scale * ups[lane / 4 + 8] : scale)};
        float sums[kOutTiles][4] = {};
        RunningRow state[2] = {{negative_infinity(), 0.0f}, {negative_infinity(), 0.0f}};
        for (int i = 0; i < runs; ++i) {
            wait_copies<kStages - 2>();
            __syncwarp();  // the run has arrived for every lane, and none reads the ring's oldest place any more
            int next[kTables];
            look_up_run(next, i + kStages);
            if (i + kStages - 1 < runs) start_run(slots, i + kStages - 1);
            commit_copies();
#pragma unroll
            for (int k = 0; k < kTables; ++k) slots[k] = next[k];
            use_run(sums, state, factors, held, i);
        }
        wait_copies<0>();
        __syncthreads();
        join(sums, state);
    }

    // ---- joining the warps ----

    DEVICE float* joined_sums(int of_warp, int row) const {
        return reinterpret_cast<float*>(shared_bytes() + kRings) + (of_warp * kRows + row) * kJoinStride;
    }
    DEVICE RunningRow* joined_states(int of_warp) const {
        return reinterpret_cast<RunningRow*>(joined_sums(kWarps, 0)) + of_warp * kRows;
    }

    DEVICE void join(const float (&sums)[kOutTiles][4], const RunningRow (&state)[2]) {
        // A warp that met a slot outside the pages makes the result NaN.
        const bool is_bad_warp = __ballot_sync(kAllLanes, is_bad) != 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + half * 8;
            float* to = joined_sums(warp, row);
#pragma unroll
            for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
                for (int i = 0; i < 2; ++i) to[dimension(tile, lane % 4 * 2 + i)] = sums[tile][half * 2 + i];
            }
            const float sum = quad_sum(state[half].sum);
            if (lane % 4 == 0) joined_states(warp)[row] = {state[half].largest, is_bad_warp ? not_a_number() : sum};
        }
        __syncthreads();
        const float value_scale = a.scales ? a.scales[a.kv_heads + kv_head] : 1.0f;
        for (int index = threadIdx.x; index < rows() * (kHeadDim / 2); index += kThreads) {
            const int row = index / (kHeadDim / 2), pair = index % (kHeadDim / 2);
            float largest = negative_infinity();
#pragma unroll
            for (int w = 0; w < kWarps; ++w) largest = larger(largest, joined_states(w)[row].largest);
            const float base = largest == negative_infinity() ? 0.0f : largest;
            float total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const RunningRow part = joined_states(w)[row];
                const float weight = exp2_fast(part.largest - base);
                const float* from = joined_sums(w, row);
                total += part.sum * weight;
                x += from[2 * pair] * weight;
                y += from[2 * pair + 1] * weight;
            }
            const float inverse = total == 0.0f ? 0.0f : value_scale / total;
            give(row, pair, x * inverse, y * inverse, largest, total);
        }
    }

    DEVICE void give(int row, int pair, float x, float y, float largest, float total) const {
        const int head = first_head() + row;
        if (a.splits == 1) {
            u8* to = a.out + sequence * a.out_token_stride + head * a.out_head_stride;
            reinterpret_cast<u32*>(to)[pair] = pack<Query>(x, y);
            return;
        }
        const i64 at = (static_cast<i64>(sequence) * a.kv_heads * a.group + head) * a.splits + split;
        reinterpret_cast<float2*>(a.partial_out + at * kHeadDim)[pair] = make_float2(x, y);
        if (pair == 0) a.partial_lse[at] = total == 0.0f ? negative_infinity() : largest + log2f(total);
    }

    static constexpr int kSharedBytes =
        kRings + (kWarps * kWarpBytes > kJoinBytes ? kWarps * kWarpBytes : kJoinBytes);
    static_assert(kSharedBytes == kAskedBytes, "the launcher asks for another amount of shared memory");
};

}  // namespace paged_decode
#endif

#ifdef KERNEL_NAME
extern "C" __global__ void __launch_bounds__(paged_decode::Decode<QUERY_KIND, KV_KIND, HEAD_DIM, STAGES, SHARED_BYTES>::kThreads, 2)
    KERNEL_NAME(const u8* queries, u8* out, const u8* pages, const int* block_tables, const int* context_lens,
                const float* scales, float* partial_out, float* partial_lse, i64 query_token_stride,
                i64 query_head_stride, i64 out_token_stride, i64 out_head_stride, i64 page_stride, i64 plane_stride,
                i64 row_stride, i64 head_stride, int block_tokens, int num_pages, int kv_heads, int group,
                int max_blocks, int split_tokens, int splits, float scale_log2) {
    const paged_decode::Arguments arguments{
        queries, out,
        {pages, page_stride, plane_stride, row_stride, head_stride, block_tokens, num_pages},
        block_tables, context_lens, scales, partial_out, partial_lse, query_token_stride, query_head_stride,
        out_token_stride, out_head_stride, kv_heads, group, max_blocks, split_tokens, splits, scale_log2};
    paged_decode::Decode<QUERY_KIND, KV_KIND, HEAD_DIM, STAGES, SHARED_BYTES>(arguments).run();
}
#endif
