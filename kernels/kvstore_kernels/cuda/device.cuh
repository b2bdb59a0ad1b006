// What every kernel stands on: integer names, 16-bit and 8-bit number types, and the few instructions that have no
// CUDA C++ name. Each of those is one small function with two forms: PTX, and a call into an emulation that is
// included before this file when a C++ compiler builds the kernels for a CPU.
#ifndef KVSTORE_DEVICE_CUH
#define KVSTORE_DEVICE_CUH

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KVSTORE_IS_CUDA 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#else
#define KVSTORE_IS_CUDA 0
#endif

#define DEVICE __device__ __forceinline__
#define ANYWHERE __host__ __device__ constexpr
#if KVSTORE_IS_CUDA
#define KVSTORE_LINE 0
#else
#define KVSTORE_LINE __builtin_LINE()
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Kinds of elements, as the build names them: -DQUERY_KIND=0 and so on.
constexpr int kBfloat16 = 0;
constexpr int kFloat16 = 1;
constexpr int kFloat8E4m3 = 2;
constexpr int kFloat8E5m2 = 3;

ANYWHERE int bytes_of(int kind) { return kind <= kFloat16 ? 2 : 1; }
ANYWHERE bool is_fp8(int kind) { return kind >= kFloat8E4m3; }

template <int kKind>
struct Element;
template <>
struct Element<kBfloat16> {
    typedef __nv_bfloat16 Type;
};
template <>
struct Element<kFloat16> {
    typedef __half Type;
};
template <>
struct Element<kFloat8E4m3> {
    typedef u8 Type;
};
template <>
struct Element<kFloat8E5m2> {
    typedef u8 Type;
};

constexpr int kWarpThreads = 32;
constexpr u32 kAllLanes = 0xFFFFFFFFu;

template <typename T>
DEVICE T smaller(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
DEVICE T larger(T a, T b) {
    return a > b ? a : b;
}
// Of a number and NaN, the number.
template <>
DEVICE float larger<float>(float a, float b) {
    return fmaxf(a, b);
}
ANYWHERE int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE float negative_infinity() {
#if KVSTORE_IS_CUDA
    return __int_as_float(0xFF800000);
#else
    return -HUGE_VALF;
#endif
}

// ---- numbers ------------------------------------------------------------------------------------------------

DEVICE float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
DEVICE float to_float(__half value) { return __half2float(value); }

DEVICE u32 bits_of(__nv_bfloat162 pair) { return static_cast<u32>(__bfloat16_as_ushort(pair.x)) | static_cast<u32>(__bfloat16_as_ushort(pair.y)) << 16; }
DEVICE u32 bits_of(__half2 pair) { return static_cast<u32>(__half_as_ushort(pair.x)) | static_cast<u32>(__half_as_ushort(pair.y)) << 16; }

// Two floats rounded to nearest even, `low` in the low half.
template <typename T>
DEVICE u32 pack(float low, float high);
template <>
DEVICE u32 pack<__nv_bfloat16>(float low, float high) {
    return bits_of(__floats2bfloat162_rn(low, high));
}
template <>
DEVICE u32 pack<__half>(float low, float high) {
    return bits_of(__floats2half2_rn(low, high));
}

template <typename T>
DEVICE float2 unpack(u32 bits);
template <>
DEVICE float2 unpack<__nv_bfloat16>(u32 bits) {
    return make_float2(to_float(__ushort_as_bfloat16(static_cast<u16>(bits))),
                       to_float(__ushort_as_bfloat16(static_cast<u16>(bits >> 16))));
}
template <>
DEVICE float2 unpack<__half>(u32 bits) {
    return make_float2(to_float(__ushort_as_half(static_cast<u16>(bits))),
                       to_float(__ushort_as_half(static_cast<u16>(bits >> 16))));
}

template <int kKind>
ANYWHERE __nv_fp8_interpretation_t fp8_format() {
    return kKind == kFloat8E4m3 ? __NV_E4M3 : __NV_E5M2;
}

// Two fp8 numbers as two fp16 numbers: exact, NaN stays NaN.
template <int kKind>
DEVICE u32 fp8_pair_to_half2(u32 pair) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), fp8_format<kKind>());
    return static_cast<u32>(raw.x) | static_cast<u32>(raw.y) << 16;
}

// Two floats rounded to nearest even and held within the format's finite range; NaN stays NaN.
template <int kKind>
DEVICE u32 floats_to_fp8_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, fp8_format<kKind>());
}

// 2 to the power of x; relative error at most 2^-22. Minus infinity gives 0.
DEVICE float exp2_fast(float x) {
#if KVSTORE_IS_CUDA
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

DEVICE float float_from_bits(u32 bits) {
#if KVSTORE_IS_CUDA
    return __uint_as_float(bits);
#else
    float value;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

DEVICE u32 bits_from_float(float value) {
#if KVSTORE_IS_CUDA
    return __float_as_uint(value);
#else
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
#endif
}

// Bytes of `low` (0..3) and `high` (4..7) in the order that the four digits of `selector` name.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
#if KVSTORE_IS_CUDA
    return __byte_perm(low, high, selector);
#else
    const u64 both = static_cast<u64>(high) << 32 | low;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= static_cast<u32>(both >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return out;
#endif
}

// The same number, but what is computed from it stays where it is written: moved out of a loop it would hold a register
// all along.
DEVICE int not_hoisted(int value) {
#if KVSTORE_IS_CUDA
    asm volatile("" : "+r"(value));
#endif
    return value;
}

// ---- global memory ------------------------------------------------------------------------------------------

// A value that is used once: it leaves what the caches hold alone.
template <typename V>
DEVICE V load_once(const V* address) {
#if KVSTORE_IS_CUDA
    return __ldcs(address);
#else
    emulation::check_aligned(address, sizeof(V), "load");
    return *address;
#endif
}

template <typename V>
DEVICE void store_once(V* address, V value) {
#if KVSTORE_IS_CUDA
    __stcs(address, value);
#else
    emulation::check_aligned(address, sizeof(V), "store");
    *address = value;
#endif
}

// ---- shared memory ------------------------------------------------------------------------------------------

DEVICE u8* shared_bytes() {
#if KVSTORE_IS_CUDA
    extern __shared__ __align__(128) u8 kvstore_shared[];
    return kvstore_shared;
#else
    return emulation::block->shared;
#endif
}

template <typename V>
DEVICE V shared_load(const void* address) {
#if KVSTORE_IS_CUDA
    return *static_cast<const V*>(address);
#else
    return emulation::shared_load<V>(address);
#endif
}

#if KVSTORE_IS_CUDA
DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
#endif

// Start to copy 16 bytes from global to shared memory; zeros instead when `is_valid` is false (nothing is read then).
DEVICE void copy_async_16(void* to, const void* from, bool is_valid) {
#if KVSTORE_IS_CUDA
    const int bytes = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
#else
    emulation::copy_async(to, from, is_valid ? 16 : 0);
#endif
}

DEVICE void commit_copies() {
#if KVSTORE_IS_CUDA
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emulation::commit_copies();
#endif
}

// Wait until all but the newest kLeft committed groups of this thread have arrived.
template <int kLeft>
DEVICE void wait_copies() {
#if KVSTORE_IS_CUDA
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#else
    emulation::wait_copies(kLeft);
#endif
}

// ---- tensor cores -------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements: lanes 8m..8m+7 name the rows of matrix m, each 16 bytes long.
DEVICE void load_matrix_x4(u32 (&out)[4], const void* row, int site = KVSTORE_LINE) {
#if KVSTORE_IS_CUDA
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    emulation::load_matrix_x4<false>(out, row, site);
#endif
}

DEVICE void load_matrix_x4_transposed(u32 (&out)[4], const void* row, int site = KVSTORE_LINE) {
#if KVSTORE_IS_CUDA
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
#else
    emulation::load_matrix_x4<true>(out, row, site);
#endif
}

// c += a b, a 16 x 16 row-major, b 16 x 8 column-major, c 16 x 8 in float (PTX ISA, mma.m16n8k16).
template <typename T>
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int site = KVSTORE_LINE);

#if KVSTORE_IS_CUDA
#define KVSTORE_MMA(TYPE, NAME)                                                                              \
    template <>                                                                                              \
    DEVICE void multiply_add<TYPE>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int) {                  \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                  \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                  \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                        \
    }
KVSTORE_MMA(__nv_bfloat16, "bf16")
KVSTORE_MMA(__half, "f16")
#undef KVSTORE_MMA
#else
template <typename T>
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int site) {
    emulation::multiply_m16n8k16<T>(c, a, b0, b1, site);
}
#endif

#endif
