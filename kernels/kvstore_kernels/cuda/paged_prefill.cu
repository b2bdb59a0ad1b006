// Causal attention of chunks of new tokens over the cached tokens of their sequences, themselves among them.
//
// Bound by the tensor cores, so built around keeping them fed. A block of threads takes one KV head and a tile of
// kRows rows; a row is one query head of one new token, the heads of a token that share the KV head lying next to each
// other, so that each key and value that is loaded serves them all. A warp takes kRowTiles * 16 rows, and its sums stay
// in registers. Keys of the next tile are loaded while values of this one are used, and the reverse:
//
//   wait keys(i), barrier | start values(i) | scores = q keys(i) | wait values(i), barrier | start keys(i + 1) |
//   softmax | sums += weights values(i) |
//
// (the order of FlashAttention-2, Dao 2023). With fp8 pages a thread turns the bytes that it loaded itself into fp16
// right after its wait, so that the same two barriers suffice.
//
// The grid is an upper bound made from tensor sizes alone; a block of threads finds its sequence by counting tiles.
// Tiles late in a sequence see more keys and come first.
//
// Builds: -DQUERY_KIND, -DKV_KIND (see device.cuh), -DHEAD_DIM, -DSHARED_BYTES.
#include "attention.cuh"

#ifndef KVSTORE_PAGED_PREFILL_CU
#define KVSTORE_PAGED_PREFILL_CU

namespace paged_prefill {

struct Arguments {
    const u8* queries;
    u8* out;
    Pages pages;
    const int* block_tables;
    const int* query_starts;
    const int* context_lens;
    const float* scales;  // [2, kv_heads] or null
    float* partial_out;   // [tokens * heads, splits, head_dim]
    float* partial_lse;   // [tokens * heads, splits], base 2
    i64 query_token_stride, query_head_stride, out_token_stride, out_head_stride;  // bytes
    int sequences, kv_heads, group, max_blocks, split_tokens, splits;
    float scale_log2;
};

template <int kQueryKind, int kKvKind, int kHeadDim, int kAskedBytes>
struct Prefill {
    typedef typename Element<kQueryKind>::Type Query;
    static constexpr bool kIsFp8 = is_fp8(kKvKind);
    typedef typename Choose<kIsFp8, __half, Query>::Type Compute;
    static constexpr int kDim = ceil_div(kHeadDim, 32) * 32;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = kWarps * kWarpThreads;
    static constexpr int kRowTiles = kDim <= 128 ? 2 : 1;  // of 16 rows, per warp
    static constexpr int kRows = kWarps * kRowTiles * 16;
    static constexpr int kTokens = kDim <= 96 ? 64 : kDim <= 128 ? 48 : 32;  // keys of one tile
    typedef Rows<kDim * 2> TileRows;
    static constexpr int kRowChunks = kHeadDim * bytes_of(kKvKind) / kChunk;  // of a cached row
    static constexpr int kLoads = ceil_div(kTokens * kRowChunks, kThreads);   // of one thread, per tile of keys
    static constexpr int kSteps = kDim / 16;
    static constexpr int kScoreTiles = kTokens / 8;
    static constexpr int kOutTiles = kDim / 8;
    static_assert(kHeadDim * bytes_of(kKvKind) % kChunk == 0, "rows are whole chunks");

    // Shared memory.
    static constexpr int kTileBytes = kTokens * TileRows::kStride;
    static constexpr int kRawBytes = kIsFp8 ? kLoads * kThreads * kChunk : 0;
    static constexpr int kKeys = kRows * TileRows::kStride;
    static constexpr int kValues = kKeys + kTileBytes;
    static constexpr int kRawKeys = kValues + kTileBytes;
    static constexpr int kRawValues = kRawKeys + kRawBytes;
    static constexpr int kOffsets = kRawValues + kRawBytes;           // of rows, for two tiles in turn
    static constexpr int kLast = kOffsets + 2 * kTokens * 8;  // last positions that rows see
    static constexpr int kBad = kLast + kRows * 4;            // whether a slot is outside the pages
    static constexpr int kSharedBytes = kBad + 16;
    static_assert(kSharedBytes == kAskedBytes, "the launcher asks for another amount of shared memory");

    const Arguments& a;
    const int lane, warp, kv_head, split;
    Context context;
    int sequence, first_token, query_tokens;  // of the sequence
    int tile;                                 // of rows within the sequence
    int begin, end;                           // positions of this split that any of these rows sees

    DEVICE Prefill(const Arguments& arguments)
        : a(arguments),
          lane(threadIdx.x % kWarpThreads),
          warp(threadIdx.x / kWarpThreads),
          kv_head(blockIdx.y),
          split(blockIdx.z),
          sequence(-1) {}

    // ---- which rows ----

    DEVICE int tiles_of(int of_sequence) const {
        if (of_sequence >= a.sequences) return 0;
        const int tokens = a.query_starts[of_sequence + 1] - a.query_starts[of_sequence];
        return larger(0, (tokens * a.group + kRows - 1) / kRows);
    }

    // Find the sequence of this block of threads; false if there is none. All warps find the same.
    DEVICE bool find_rows() {
        int before = 0;
        const int wanted = blockIdx.x;
        for (int base = 0; base < a.sequences && sequence < 0; base += kWarpThreads) {
            int count = tiles_of(base + lane);
#pragma unroll
            for (int distance = 1; distance < kWarpThreads; distance *= 2) {
                const int other = __shfl_up_sync(kAllLanes, count, distance);
                if (lane >= distance) count += other;
            }
            const u32 after = __ballot_sync(kAllLanes, before + count > wanted);
            const int found = after ? __ffs(after) - 1 : 0;
            const int through = before + __shfl_sync(kAllLanes, count, found);
            if (after) {
                sequence = base + found;
                tile = through - 1 - wanted;  // the last first
            }
            before += __shfl_sync(kAllLanes, count, kWarpThreads - 1);
        }
        if (sequence < 0) return false;
        first_token = a.query_starts[sequence];
        query_tokens = a.query_starts[sequence + 1] - first_token;
        context = context_of(a.block_tables, a.context_lens, sequence, a.max_blocks, a.pages.block_tokens);
        const int last_token = smaller((tile * kRows + kRows - 1) / a.group, query_tokens - 1);
        const i64 first = static_cast<i64>(split) * a.split_tokens;
        end = larger(0, context.length - query_tokens + last_token + 1);
        end = static_cast<int>(smaller<i64>(first + a.split_tokens, end));
        begin = static_cast<int>(smaller<i64>(first, end));
        return true;
    }

    DEVICE int row_token(int row) const { return (tile * kRows + row) / a.group; }
    DEVICE int row_head(int row) const { return kv_head * a.group + (tile * kRows + row) % a.group; }
    DEVICE bool is_row(int row) const { return tile * kRows + row < query_tokens * a.group; }

    // ---- queries ----

    DEVICE const u8* query_row(int row) const {
        return a.queries + (first_token + row_token(row)) * a.query_token_stride +
               row_head(row) * a.query_head_stride;
    }

    DEVICE void start_queries() {
        constexpr int kChunks = kHeadDim * 2 / kChunk;
        for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
            const int row = index / kChunks, chunk = index % kChunks;
            const bool is_valid = is_row(row);
            const u8* from = is_valid ? query_row(row) + chunk * kChunk : a.queries;
            copy_async_16(shared_bytes() + TileRows::offset(row, chunk), from, is_valid);
        }
    }

    // For fp8 pages: each warp converts its own rows, by one factor for them all (see row_factor). Returns its inverse.
    DEVICE float convert_queries() {
        constexpr int kWarpRows = kRowTiles * 16, kPairs = kHeadDim / 2;
        float largest = 0.0f;
        for (int index = lane; index < kWarpRows * kPairs; index += kWarpThreads) {
            const float2 value = query_pair(warp * kWarpRows + index / kPairs, index % kPairs);
            largest = larger(largest, larger(fabsf(value.x), fabsf(value.y)));
        }
#pragma unroll
        for (int bits = 1; bits < kWarpThreads; bits *= 2) {
            largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, bits));
        }
        const RowFactor factor = row_factor(largest);
        for (int index = lane; index < kWarpRows * kPairs; index += kWarpThreads) {
            const int row = warp * kWarpRows + index / kPairs, pair = index % kPairs;
            const float2 value = query_pair(row, pair);
            u8* to = shared_bytes() + TileRows::offset(row, pair / 4) + pair % 4 * 4;
            *reinterpret_cast<u32*>(to) = pack<Compute>(value.x * factor.down, value.y * factor.down);
        }
        return factor.up;
    }

    DEVICE float2 query_pair(int row, int pair) const {
        if (!is_row(row)) return make_float2(0.0f, 0.0f);
        return unpack<Query>(reinterpret_cast<const u32*>(query_row(row))[pair]);
    }

    // Columns between the head's own and the padded size are never loaded, and must not be NaN.
    DEVICE void clear_padding() {
        if constexpr (kHeadDim != kDim) {
            for (int at = threadIdx.x * kChunk; at < kRawKeys; at += kThreads * kChunk) {
                *reinterpret_cast<uint4*>(shared_bytes() + at) = make_uint4(0, 0, 0, 0);
            }
            __syncthreads();
        }
    }

    // ---- keys and values ----

    DEVICE i64* offsets(int of_tile) const {
        return reinterpret_cast<i64*>(shared_bytes() + kOffsets) + of_tile % 2 * kTokens;
    }
    DEVICE int first_position(int of_tile) const { return begin + of_tile * kTokens; }

    DEVICE int look_up_tile(int of_tile) const {
        const int token = threadIdx.x;
        return token < kTokens ? look_up(context, a.pages, first_position(of_tile) + token, end) : kNoToken;
    }

    DEVICE void keep_offsets(int slot, int of_tile) {
        const int token = threadIdx.x;
        if (slot == kBadPage) *reinterpret_cast<volatile int*>(shared_bytes() + kBad) = 1;
        if (token < kTokens) offsets(of_tile)[token] = row_offset(a.pages, slot, first_position(of_tile) + token);
    }

    // Start to load one plane of a tile: keys (0) or values (1).
    DEVICE void start_plane(int plane, int of_tile) {
        const u8* head = a.pages.base + kv_head * a.pages.head_stride + plane * a.pages.plane_stride;
        u8* tile_memory = shared_bytes() + (plane ? kValues : kKeys);
        u8* raw = shared_bytes() + (plane ? kRawValues : kRawKeys);
#pragma unroll 2
        for (int i = 0; i < kLoads; ++i) {
            const int index = i * kThreads + not_hoisted(threadIdx.x);
            const int row = index / kRowChunks, chunk = index % kRowChunks;
            if (kTokens * kRowChunks % kThreads && row >= kTokens) break;
            const i64 offset = offsets(of_tile)[row];
            const bool is_token = offset >= 0;
            const u8* from = head + (is_token ? offset : 0) + chunk * kChunk;
            copy_async_16(kIsFp8 ? raw + index * kChunk : tile_memory + TileRows::offset(row, chunk), from, is_token);
        }
        commit_copies();
    }

    // For fp8 pages: turn the bytes that this thread has loaded into fp16.
    DEVICE void convert_plane(int plane) {
        if constexpr (kIsFp8) {
            u8* tile_memory = shared_bytes() + (plane ? kValues : kKeys);
            const u8* raw = shared_bytes() + (plane ? kRawValues : kRawKeys);
#pragma unroll 1
            for (int i = 0; i < kLoads; ++i) {
                const int index = i * kThreads + not_hoisted(threadIdx.x);
                const int row = index / kRowChunks, chunk = index % kRowChunks;
                if (kTokens * kRowChunks % kThreads && row >= kTokens) break;
                const uint4 bytes = shared_load<uint4>(raw + index * kChunk);
                const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
                u32 wide[8];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    wide[2 * w] = fp8_pair_to_half2<kKvKind>(words[w] & 0xFFFF);
                    wide[2 * w + 1] = fp8_pair_to_half2<kKvKind>(words[w] >> 16);
                }
                const uint4 low = make_uint4(wide[0], wide[1], wide[2], wide[3]);
                const uint4 high = make_uint4(wide[4], wide[5], wide[6], wide[7]);
                // Four lanes write the low halves and their neighbours the high ones: 8 different groups of banks.
                const int first = chunk / 4 % 2;
                *reinterpret_cast<uint4*>(tile_memory + TileRows::offset(row, 2 * chunk + first)) = first ? high : low;
                *reinterpret_cast<uint4*>(tile_memory + TileRows::offset(row, 2 * chunk + 1 - first)) =
                    first ? low : high;
            }
        }
    }

    // ---- arithmetic ----

    DEVICE int own_row(int row_tile, int half) const {
        return (warp * kRowTiles + row_tile) * 16 + lane / 4 + half * 8;
    }

    DEVICE void add_scores(float (&scores)[kRowTiles][kScoreTiles][4]) const {
        const u8* keys = shared_bytes() + kKeys;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            u32 query[kRowTiles][4];
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
                const int row = (warp * kRowTiles + t) * 16 + lane % 16;
                load_matrix_x4(query[t], shared_bytes() + TileRows::offset(row, 2 * step + lane / 16));
            }
#pragma unroll
            for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
                u32 key[4];
                const int row = pair * 16 + lane / 16 * 8 + lane % 8;
                load_matrix_x4(key, keys + TileRows::offset(row, 2 * step + lane / 8 % 2));
#pragma unroll
                for (int t = 0; t < kRowTiles; ++t) {
                    multiply_add<Compute>(scores[t][2 * pair], query[t], key[0], key[1]);
                    multiply_add<Compute>(scores[t][2 * pair + 1], query[t], key[2], key[3]);
                }
            }
        }
    }

    DEVICE void add_values(float (&sums)[kRowTiles][kOutTiles][4],
                           const u32 (&weights)[kRowTiles][kTokens / 16][4]) const {
        const u8* values = shared_bytes() + kValues;
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step) {
#pragma unroll
            for (int pair = 0; pair < kOutTiles / 2; ++pair) {
                u32 value[4];
                load_matrix_x4_transposed(value, values + TileRows::offset(step * 16 + lane % 16, 2 * pair + lane / 16));
#pragma unroll
                for (int t = 0; t < kRowTiles; ++t) {
                    multiply_add<Compute>(sums[t][2 * pair], weights[t][step], value[0], value[1]);
                    multiply_add<Compute>(sums[t][2 * pair + 1], weights[t][step], value[2], value[3]);
                }
            }
        }
    }

    // The last position of this split that each row sees.
    DEVICE int* last_positions() const { return reinterpret_cast<int*>(shared_bytes() + kLast); }

    DEVICE void keep_last_positions() {
        for (int row = threadIdx.x; row < kRows; row += kThreads) {
            last_positions()[row] = smaller(end - 1, context.length - query_tokens + row_token(row));
        }
    }

    // Hide keys behind a row's own position, and behind the end of this split.
    DEVICE void hide(float (&scores)[kRowTiles][kScoreTiles][4], int first) const {
        if (first + kTokens <= last_positions()[0] + 1) return;
        const int own = first + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int left = last_positions()[own_row(t, half)] - own;
#pragma unroll
                for (int tile_of = 0; tile_of < kScoreTiles; ++tile_of) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (tile_of * 8 + i > left) scores[t][tile_of][half * 2 + i] = negative_infinity();
                    }
                }
            }
        }
    }

    DEVICE void run() {
        if (!find_rows()) return;
        const int tiles = (end - begin + kTokens - 1) / kTokens;
        clear_padding();
        if (threadIdx.x == 0) *reinterpret_cast<volatile int*>(shared_bytes() + kBad) = context.is_invalid;
        __syncthreads();
        keep_last_positions();
        keep_offsets(look_up_tile(0), 0);
        float factor = a.scale_log2 * (a.scales ? a.scales[kv_head] : 1.0f);
        if constexpr (kIsFp8) {
            factor *= convert_queries();
        } else {
            start_queries();
        }
        factor = score_factor(factor);
        __syncthreads();
        start_plane(0, 0);

        float sums[kRowTiles][kOutTiles][4] = {};
        RunningRow state[kRowTiles][2];
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                state[t][half] = {negative_infinity(), 0.0f};
            }
        }

        for (int i = 0; i < tiles; ++i) {
            const int next_slot = look_up_tile(i + 1);
            wait_copies<0>();
            convert_plane(0);
            __syncthreads();  // keys(i) are there; nobody uses values(i - 1) any more
            start_plane(1, i);
            float scores[kRowTiles][kScoreTiles][4] = {};
            add_scores(scores);
            keep_offsets(next_slot, i + 1);
            wait_copies<0>();
            convert_plane(1);
            __syncthreads();  // values(i) are there; nobody uses keys(i) any more
            if (i + 1 < tiles) start_plane(0, i + 1);
            hide(scores, first_position(i));
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
                const float low = take_scores(state[t][0], scores[t], 0, factor);
                const float high = take_scores(state[t][1], scores[t], 2, factor);
#pragma unroll
                for (int tile_of = 0; tile_of < kOutTiles; ++tile_of) {
                    sums[t][tile_of][0] *= low;
                    sums[t][tile_of][1] *= low;
                    sums[t][tile_of][2] *= high;
                    sums[t][tile_of][3] *= high;
                }
            }
            u32 weights[kRowTiles][kTokens / 16][4];
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
                for (int step = 0; step < kTokens / 16; ++step) {
                    weights_as_operand<Compute>(weights[t][step], scores[t], step);
                }
            }
            add_values(sums, weights);
        }
        wait_copies<0>();
        __syncthreads();
        give(sums, state);
    }

    // ---- results ----

    DEVICE void give(float (&sums)[kRowTiles][kOutTiles][4], const RunningRow (&state)[kRowTiles][2]) const {
        const bool is_bad = *reinterpret_cast<volatile int*>(shared_bytes() + kBad) != 0;
        const float value_scale = a.scales ? a.scales[a.kv_heads + kv_head] : 1.0f;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float total = is_bad ? not_a_number() : quad_sum(state[t][half].sum);
                const float inverse = total == 0.0f ? 0.0f : value_scale / total;
                const int row = own_row(t, half);
                if (a.splits == 1) {
                    keep_row(sums[t], row, half, inverse);
                } else if (is_row(row)) {
                    give_partial(sums[t], row, half, inverse,
                                 total == 0.0f ? negative_infinity() : state[t][half].largest + log2f(total));
                }
            }
        }
        if (a.splits == 1) {
            __syncwarp();
            give_rows();
        }
    }

    // A row of the result to shared memory, in place of the queries that only this warp reads.
    DEVICE void keep_row(const float (&sums)[kOutTiles][4], int row, int half, float inverse) const {
#pragma unroll
        for (int tile_of = 0; tile_of < kOutTiles; ++tile_of) {
            u8* to = shared_bytes() + TileRows::offset(row, tile_of) + lane % 4 * 4;
            *reinterpret_cast<u32*>(to) =
                pack<Query>(sums[tile_of][half * 2] * inverse, sums[tile_of][half * 2 + 1] * inverse);
        }
    }

    DEVICE void give_rows() const {
        constexpr int kChunks = kHeadDim * 2 / kChunk;
        for (int index = lane; index < kRowTiles * 16 * kChunks; index += kWarpThreads) {
            const int row = warp * kRowTiles * 16 + index / kChunks, chunk = index % kChunks;
            if (!is_row(row)) break;
            u8* to = a.out + (first_token + row_token(row)) * a.out_token_stride + row_head(row) * a.out_head_stride;
            reinterpret_cast<uint4*>(to)[chunk] = shared_load<uint4>(shared_bytes() + TileRows::offset(row, chunk));
        }
    }

    DEVICE void give_partial(const float (&sums)[kOutTiles][4], int row, int half, float inverse, float lse) const {
        const i64 token = first_token + row_token(row);
        const i64 at = (token * a.kv_heads * a.group + row_head(row)) * a.splits + split;
        float* to = a.partial_out + at * kHeadDim;
#pragma unroll
        for (int tile_of = 0; tile_of < kHeadDim / 8; ++tile_of) {
            reinterpret_cast<float2*>(to + tile_of * 8)[lane % 4] =
                make_float2(sums[tile_of][half * 2] * inverse, sums[tile_of][half * 2 + 1] * inverse);
        }
        if (lane % 4 == 0) a.partial_lse[at] = lse;
    }
};

}  // namespace paged_prefill
#endif

#ifdef KERNEL_NAME
extern "C" __global__ void __launch_bounds__(paged_prefill::Prefill<QUERY_KIND, KV_KIND, HEAD_DIM, SHARED_BYTES>::kThreads, 2)
    KERNEL_NAME(const u8* queries, u8* out, const u8* pages, const int* block_tables, const int* query_starts,
                const int* context_lens, const float* scales, float* partial_out, float* partial_lse,
                i64 query_token_stride, i64 query_head_stride, i64 out_token_stride, i64 out_head_stride,
                i64 page_stride, i64 plane_stride, i64 row_stride, i64 head_stride, int block_tokens, int num_pages,
                int sequences, int kv_heads, int group, int max_blocks, int split_tokens, int splits,
                float scale_log2) {
    const paged_prefill::Arguments arguments{
        queries, out,
        {pages, page_stride, plane_stride, row_stride, head_stride, block_tokens, num_pages},
        block_tables, query_starts, context_lens, scales, partial_out, partial_lse, query_token_stride,
        query_head_stride, out_token_stride, out_head_stride, sequences, kv_heads, group, max_blocks, split_tokens,
        splits, scale_log2};
    paged_prefill::Prefill<QUERY_KIND, KV_KIND, HEAD_DIM, SHARED_BYTES>(arguments).run();
}
#endif
