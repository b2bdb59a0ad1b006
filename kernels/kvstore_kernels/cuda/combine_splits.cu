// Joins what the splits of a context gave for each query row: their outputs weighed by their share of the softmax.
//
// One warp per row. A split that saw no key has the logarithm minus infinity and no weight; a row without any gives
// zeros. Builds: -DQUERY_KIND, -DHEAD_DIM.
#include "device.cuh"

#ifndef KVSTORE_COMBINE_SPLITS_CU
#define KVSTORE_COMBINE_SPLITS_CU

namespace combine_splits {

constexpr int kThreads = 128;

template <typename T, int kHeadDim>
DEVICE void combine_row(const float* partial_out, const float* partial_lse, u8* out, int splits) {
    const int lane = threadIdx.x % kWarpThreads;
    float largest = negative_infinity();
    for (int split = lane; split < splits; split += kWarpThreads) largest = larger(largest, partial_lse[split]);
#pragma unroll
    for (int bits = 1; bits < kWarpThreads; bits *= 2) {
        largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, bits));
    }
    const float base = largest == negative_infinity() ? 0.0f : largest;
    constexpr int kQuads = ceil_div(kHeadDim, 4 * kWarpThreads);
    float4 sums[kQuads] = {};
    float total = 0.0f;
    for (int split = 0; split < splits; ++split) {
        const float lse = partial_lse[split];
        if (lse == negative_infinity()) continue;
        const float weight = exp2_fast(lse - base);
        total += weight;
        const float4* from = reinterpret_cast<const float4*>(partial_out + static_cast<i64>(split) * kHeadDim);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const int quad = lane + i * kWarpThreads;
            if (quad >= kHeadDim / 4) break;
            const float4 value = from[quad];
            sums[i].x += weight * value.x;
            sums[i].y += weight * value.y;
            sums[i].z += weight * value.z;
            sums[i].w += weight * value.w;
        }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        const int quad = lane + i * kWarpThreads;
        if (quad >= kHeadDim / 4) break;
        reinterpret_cast<uint2*>(out)[quad] = make_uint2(pack<T>(sums[i].x * inverse, sums[i].y * inverse),
                                                         pack<T>(sums[i].z * inverse, sums[i].w * inverse));
    }
}

}  // namespace combine_splits
#endif

#ifdef KERNEL_NAME
extern "C" __global__ void __launch_bounds__(combine_splits::kThreads)
    KERNEL_NAME(const float* partial_out, const float* partial_lse, u8* out, int rows, int heads, int splits,
                i64 out_token_stride, i64 out_head_stride) {
    const int row = blockIdx.x * (combine_splits::kThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
    if (row >= rows) return;
    const i64 first = static_cast<i64>(row) * splits;
    combine_splits::combine_row<Element<QUERY_KIND>::Type, HEAD_DIM>(
        partial_out + first * HEAD_DIM, partial_lse + first,
        out + row / heads * out_token_stride + row % heads * out_head_stride, splits);
}
#endif
