// Attention of new tokens over the pages of their sequences, on a CPU.
//
// The bits of a row depend on its query, its position and its sequence's keys and values alone. Keys are taken
// in blocks of 32 at absolute positions, with an online softmax from block to block; a row that ends inside a
// block leaves out the rest of it. Which rows are computed together changes nothing: every row's operations are
// the same and come in the same order. All arithmetic is float32, on vectors of 16.

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 32;
constexpr int kMaxQueries = 1024;
constexpr int kFewQueries = 256;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Uint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));

struct Bf16 {
  uint16_t bits;
};

struct Fp8 {
  uint8_t bits;
};

// The value of each e4m3 number: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities.
struct Fp8Values {
  float of[256];
  constexpr Fp8Values() : of() {
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> 3 & 15, mantissa = bits & 7;
      float value = exponent ? 1.0f + mantissa / 8.0f : mantissa / 8.0f;
      for (int step = exponent ? exponent : 1; step > 7; --step) value *= 2.0f;
      for (int step = exponent ? exponent : 1; step < 7; ++step) value /= 2.0f;
      if ((bits & 127) == 127) value = __builtin_nanf("");
      of[bits] = bits >> 7 ? -value : value;
    }
  }
};

constexpr Fp8Values kFp8;

template <typename T>
inline T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline void write(float* to, Vec value) { std::memcpy(to, &value, sizeof(Vec)); }

inline Vec load(const float* from) { return read<Vec>(from); }

inline Vec load(const Bf16* from) {
  const Uint wide = __builtin_convertvector(read<Half>(from), Uint) << 16;
  return read<Vec>(&wide);
}

inline Vec load(const _Float16* from) {
  Vec value;
  for (int i = 0; i < kLanes; ++i) value[i] = static_cast<float>(from[i]);
  return value;
}

inline Vec load(const Fp8* from) {
  Vec value;
  for (int i = 0; i < kLanes; ++i) value[i] = kFp8.of[from[i].bits];
  return value;
}

inline void store(float* to, Vec value) { write(to, value); }

inline void store(Bf16* to, Vec value) {
  Uint bits = read<Uint>(&value);
  bits += 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even; attention's results are finite
  const Half half = __builtin_convertvector(bits >> 16, Half);
  std::memcpy(to, &half, sizeof(Half));
}

inline void store(_Float16* to, Vec value) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<_Float16>(value[i]);
}

inline Vec splat(float value) { return Vec{} + value; }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec v) {
  v = larger(v, __builtin_shuffle(v, Int{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  v = larger(v, __builtin_shuffle(v, Int{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  v = larger(v, __builtin_shuffle(v, Int{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  v = larger(v, __builtin_shuffle(v, Int{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return v[0];
}

// e^x for x <= 0, to about 2 units in the last place (the polynomial is Cephes' expf).
inline Vec exponential(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  const Vec turns = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Vec rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Vec sum = splat(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Int power = (__builtin_convertvector(turns, Int) + 127) << 23;
  return sum * read<Vec>(&power);
}

// Sums the lanes of 16 vectors: lane i of the result is the sum of sums[i].
inline Vec sum_each(Vec* v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shuffle(a, b, Int{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
           __builtin_shuffle(a, b, Int{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shuffle(a, b, Int{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
           __builtin_shuffle(a, b, Int{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shuffle(a, b, Int{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}) +
           __builtin_shuffle(a, b, Int{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
  }
  const Vec a = v[0], b = v[1];
  return __builtin_shuffle(a, b, Int{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}) +
         __builtin_shuffle(a, b, Int{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

// State of one query's online softmax; the lanes of `total` are summed at the end.
struct Row {
  Vec total;
  float highest;
};

// Adds one block of keys, of which `count` come before the query's end, to a row.
template <int kDim>
inline void add_block(const float* query, const float* keys, const float* values, int count, Row& row,
                      float* mixed) {
  constexpr int kParts = kDim / kLanes;
  const Int lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec scores[kBlock / kLanes];
  for (int group = 0; group < kBlock / kLanes; ++group) {
    Vec sums[kLanes];
#pragma GCC unroll 16
    for (int key = 0; key < kLanes; ++key) {
      const float* at = keys + (group * kLanes + key) * kDim;
      Vec sum = load(query) * load(at);
      for (int part = 1; part < kParts; ++part) sum += load(query + part * kLanes) * load(at + part * kLanes);
      sums[key] = sum;
    }
    scores[group] = lanes + group * kLanes < count ? sum_each(sums) : splat(-3.0e38f);
  }
  const float best = largest(larger(scores[0], scores[1]));
  const float highest = best > row.highest ? best : row.highest;
  const float shrink = exponential(splat(row.highest - highest))[0];
  float weights[kBlock];
  row.total *= shrink;
  row.highest = highest;
  for (int group = 0; group < kBlock / kLanes; ++group) {
    Vec weight = exponential(scores[group] - highest);
    weight = lanes + group * kLanes < count ? weight : splat(0.0f);
    write(weights + group * kLanes, weight);
    row.total += weight;
  }
  Vec even[kParts], odd[kParts];
  for (int part = 0; part < kParts; ++part) {
    even[part] = load(mixed + part * kLanes) * shrink;
    odd[part] = Vec{};
  }
  for (int key = 0; key < kBlock; key += 2) {
    for (int part = 0; part < kParts; ++part) {
      even[part] += load(values + key * kDim + part * kLanes) * weights[key];
      odd[part] += load(values + (key + 1) * kDim + part * kLanes) * weights[key + 1];
    }
  }
  for (int part = 0; part < kParts; ++part) write(mixed + part * kLanes, even[part] + odd[part]);
}

}  // namespace

extern "C" {

// Element counts are of the pages' dtype. A page holds [layers, 2, block_tokens, kv_heads, head_dim]; `pages` points at
// the layer's keys in page 0. Segment i has `counts[i]` rows from row `firsts[i]` of queries and mixed, which
// are [rows, kv_heads * groups, head_dim], at positions `starts[i]`..., and its block table is
// tables[offsets[i]...]. counts[i] * groups is at most 1024. `scratch` has room for 2 * 32 + 2 * 1024 vectors of
// head_dim floats.
struct Call {
  const void* pages;
  const void* queries;
  void* mixed;
  float* scratch;
  const int32_t* tables;
  const int64_t* offsets;
  const int64_t* firsts;
  const int64_t* counts;
  const int64_t* starts;
  int64_t page_stride;
  int64_t value_offset;
  int64_t block_tokens;
  int64_t kv_heads;
  int64_t groups;
  int64_t head_dim;
  float scale;
};

}  // extern "C"

namespace {

// Rows of one segment under way, for heads head..head + num_heads; queries are ordered by KV head, then row.
// T is the dtype of queries and results, P that of the pages.
template <typename T, typename P, int kDim>
struct Work {
  const Call& call;
  int64_t segment, head, num_heads;
  int64_t num_queries = call.counts[segment] * call.groups;
  float* keys = call.scratch;
  float* values = keys + kBlock * kDim;
  float* queries = values + kBlock * kDim;
  float* mixed = queries + num_heads * num_queries * kDim;
  Row rows[kMaxQueries];  // those in use are set by begin()

  Work(const Call& of, int64_t which, int64_t first_head, int64_t heads)
      : call(of), segment(which), head(first_head), num_heads(heads) {}

  int64_t place(int64_t which, int64_t query) const {
    const int64_t row = call.firsts[segment] + query / call.groups;
    const int64_t head_of_row = (head + which) * call.groups + query % call.groups;
    return (row * call.kv_heads * call.groups + head_of_row) * kDim;
  }

  void begin() {
    for (int64_t at = 0; at < num_heads * num_queries; ++at) {
      const T* from = static_cast<const T*>(call.queries) + place(at / num_queries, at % num_queries);
      rows[at] = {Vec{}, -3.0e38f};
      for (int dim = 0; dim < kDim; dim += kLanes) {
        write(queries + at * kDim + dim, load(from + dim) * call.scale);
        write(mixed + at * kDim + dim, Vec{});
      }
    }
  }

  void gather(int64_t which, int64_t block, int64_t known) {
    const P* pages = static_cast<const P*>(call.pages) + (head + which) * kDim;
    const int32_t* table = call.tables + call.offsets[segment];
    const int64_t width = call.kv_heads * kDim;
    for (int64_t key = 0; key < known; ++key) {
      const int64_t position = block + key;
      const P* from = pages + table[position / call.block_tokens] * call.page_stride +
                      position % call.block_tokens * width;
      for (int dim = 0; dim < kDim; dim += kLanes) {
        write(keys + key * kDim + dim, load(from + dim));
        write(values + key * kDim + dim, load(from + call.value_offset + dim));
      }
    }
    std::memset(keys + known * kDim, 0, (kBlock - known) * kDim * sizeof(float));
    std::memset(values + known * kDim, 0, (kBlock - known) * kDim * sizeof(float));
  }

  void add(int64_t which, int64_t block) {
    const int64_t start = call.starts[segment];
    const int64_t first = block > start ? (block - start) * call.groups : 0;  // rows before end before it
    for (int64_t query = first; query < num_queries; ++query) {
      const int64_t left = start + query / call.groups + 1 - block, at = which * num_queries + query;
      add_block<kDim>(queries + at * kDim, keys, values, left < kBlock ? left : kBlock, rows[at],
                      mixed + at * kDim);
    }
  }

  void finish() {
    for (int64_t at = 0; at < num_heads * num_queries; ++at) {
      T* to = static_cast<T*>(call.mixed) + place(at / num_queries, at % num_queries);
      float total = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) total += rows[at].total[lane];
      const float share = 1.0f / total;
      for (int dim = 0; dim < kDim; dim += kLanes) store(to + dim, load(mixed + at * kDim + dim) * share);
    }
  }

  void run() {
    const int64_t end = call.starts[segment] + call.counts[segment];
    begin();
    for (int64_t block = 0; block < end; block += kBlock) {
      for (int64_t which = 0; which < num_heads; ++which) {
        gather(which, block, end - block < kBlock ? end - block : kBlock);
        add(which, block);
      }
    }
    finish();
  }
};

// A segment of few rows takes all heads at once, so that it reads pages from end to end.
template <typename T, typename P, int kDim>
void attend(const Call& call, int64_t segment) {
  const int64_t queries = call.counts[segment] * call.groups * call.kv_heads;
  const int64_t together = queries <= kFewQueries ? call.kv_heads : 1;
  for (int64_t head = 0; head < call.kv_heads; head += together) {
    Work<T, P, kDim>(call, segment, head, together).run();
  }
}

template <typename T, typename P = T>
int attend_tasks(const Call& call, int64_t begin, int64_t end) {
  for (int64_t segment = begin; segment < end; ++segment) {
    switch (call.head_dim) {
      case 16: attend<T, P, 16>(call, segment); break;
      case 32: attend<T, P, 32>(call, segment); break;
      case 64: attend<T, P, 64>(call, segment); break;
      case 80: attend<T, P, 80>(call, segment); break;
      case 96: attend<T, P, 96>(call, segment); break;
      case 128: attend<T, P, 128>(call, segment); break;
      case 256: attend<T, P, 256>(call, segment); break;
      default: return 1;
    }
  }
  return 0;
}

}  // namespace

extern "C" {

// Each computes segments begin..end; 0, or 1 if the head size is not built in.
int attend_bfloat16(const Call* call, int64_t begin, int64_t end) { return attend_tasks<Bf16>(*call, begin, end); }
int attend_float16(const Call* call, int64_t begin, int64_t end) {
  return attend_tasks<_Float16>(*call, begin, end);
}
int attend_float32(const Call* call, int64_t begin, int64_t end) { return attend_tasks<float>(*call, begin, end); }

// The same over pages of fp8 e4m3, whose numbers stand for themselves.
int attend_bfloat16_over_fp8(const Call* call, int64_t begin, int64_t end) {
  return attend_tasks<Bf16, Fp8>(*call, begin, end);
}
int attend_float16_over_fp8(const Call* call, int64_t begin, int64_t end) {
  return attend_tasks<_Float16, Fp8>(*call, begin, end);
}
int attend_float32_over_fp8(const Call* call, int64_t begin, int64_t end) {
  return attend_tasks<float, Fp8>(*call, begin, end);
}

}  // extern "C"
