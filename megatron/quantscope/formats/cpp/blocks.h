// What the blocks of a tensor are like before any format is chosen (`blocks.py`): counts by the exponent and the
// fraction of amax, and of elements by how many binades they lie below the amax of their block.
//
// Depths below 16 are counted as `sweep.h` counts binades, a bit for each in the lane of the element. What lies deeper,
// and what is subnormal, is rare and is looked at by itself.
#pragma once

#include "statistics.h"
#include "tensors.h"

namespace {

constexpr int COUNTED_BLOCK = 32;
constexpr int FRACTION_CLASSES = 4;
constexpr int DEPTHS = 64;  // the last takes all that is smaller
constexpr int SHALLOW = 16;

// The result, as Python sees it.
struct BlockCounts {
  int64_t zero, nonfinite;
  int64_t amax[EXPONENTS][FRACTION_CLASSES];
  int64_t depths[DEPTHS];

  void add(const BlockCounts& other) {
    zero += other.zero;
    nonfinite += other.nonfinite;
    for (int e = 0; e < EXPONENTS; e++)
      for (int c = 0; c < FRACTION_CLASSES; c++) amax[e][c] += other.amax[e][c];
    for (int d = 0; d < DEPTHS; d++) depths[d] += other.depths[d];
  }
};

// floor(log2) of a magnitude that is not 0, from the bits of a float32.
inline int exponent_of(int32_t bits) {
  return bits >> FRACTION ? (bits >> FRACTION) - BIAS : 31 - __builtin_clz(bits) + LEAST_EXPONENT;
}

// Which class of fractions (<= 1.5, <= 1.75, <= 1.875, above) a magnitude that is not 0 belongs to.
inline int fraction_class(int32_t bits) {
  const int32_t one = 1 << FRACTION;
  if (bits < one) bits <<= __builtin_clz(bits) - (31 - FRACTION);
  const int32_t fraction = bits & (one - 1);
  return (fraction > one / 2) + (fraction > one / 4 * 3) + (fraction > one / 8 * 7);
}

inline void count_amax(int32_t bits, BlockCounts& counts) {
  if (!bits)
    counts.zero++;
  else if (bits >= EXPONENT)
    counts.nonfinite++;
  else
    counts.amax[exponent_of(bits) - LEAST_EXPONENT][fraction_class(bits)]++;
}

// Counts blocks that have been brought into vectors, as bf16 or as float32.
template <class D> class BlockCounter {
  using T = typename D::T;

 public:
  explicit BlockCounter(bool depths = false) : depths_(depths) {}

  // `blocks` <= ROW_BLOCKS of them, one after the other.
  void add_rows(const T* x, int blocks) {
    alignas(WIDTH) typename D::Lane amax[ROW_BLOCKS];
    largest_of_rows<D>(x, blocks, COUNTED_BLOCK, amax);
    for (int b = 0; b < blocks; b++) count_amax(D::widened(amax[b]), counts_);
    if (!depths_) return;
    alignas(WIDTH) T tops[HALF_LANES];
    int i = 0, end = blocks * COUNTED_BLOCK;
    add_depths([&](const T** from, const T** top) __attribute__((always_inline)) {
      if (i == end) return false;
      const T amax_of_it = as<T>(amax[i / COUNTED_BLOCK]);
      for (T& lane : tops) lane = amax_of_it;
      *from = x + i;
      *top = tops;
      i += HALF_LANES;
      return true;
    });
  }

  // `width` <= HALF_LANES of them beside each other, with room for as many; `stride` is from row to row.
  void add_columns(const T* x, int64_t stride, int width) {
    alignas(WIDTH) T tops[HALF_LANES];
    for (int c = 0; c < HALF_LANES; c += D::COUNT) {
      typename D::Bits amax{};
      for (int r = 0; r < COUNTED_BLOCK; r++) amax = larger(amax, D::magnitudes(x + r * stride + c));
      put(tops + c, amax);
    }
    for (int c = 0; c < width; c++) count_amax(bits_of(tops[c]), counts_);
    if (!depths_) return;
    int r = 0;
    add_depths([&](const T** from, const T** top) __attribute__((always_inline)) {
      if (r == COUNTED_BLOCK) return false;
      *from = x + r++ * stride;
      *top = tops;
      return true;
    });
  }

  void onto(BlockCounts& total) {
#if defined(QS_SWEEPS)
    for (int level = 0; level < FOLD; level++) tally(levels_[level], 1 << level);
#endif
    total.add(counts_);
  }

 private:
  static int32_t bits_of(uint16_t x) { return x << 16; }
  static int32_t bits_of(float x) { return as<int32_t>(x); }

  // The elements of a vector that are subnormal or lie `least` binades deep or deeper, one by one.
  void each(const T* x, const T* tops, int least) {
    for (int i = 0; i < HALF_LANES; i++) {
      const int32_t top = bits_of(tops[i]), element = bits_of(x[i]) & ~SIGN;
      if (!element || top >= EXPONENT) continue;
      const int depth = exponent_of(top) - exponent_of(element);
      if (depth < least && element >> FRACTION) continue;
      counts_.depths[depth < DEPTHS ? depth : DEPTHS - 1]++;
    }
  }

#if defined(QS_SWEEPS)
  // more(&x, &tops): the next HALF_LANES elements, and the largest magnitudes of their blocks; or false.
  template <class More> QS_INLINE void add_depths(const More& more) {
    bool left = true;
    const auto next = [&]() __attribute__((always_inline)) {
      const T *x, *tops;
      left = left && more(&x, &tops);
      if (!left) return I16{};
      const Step<D> elements(x), largest(tops);
      const I16 fields = fields_of(elements), highest = fields_of(largest), below = highest - fields;
      const I16 none = zeros(elements) | (highest == static_cast<int16_t>(2 * BIAS + 1));
      const I16 aside = (below >= static_cast<int16_t>(SHALLOW)) | (fields == I16{});
      if (__builtin_expect(any(aside & ~none), 0)) each(x, tops, SHALLOW);
      return power_of_two((below | aside | none) & static_cast<int16_t>(255));
    };
    while (left) tally(added<FOLD>(levels_, next), 1 << FOLD);
  }

  static QS_INLINE I16 fields_of(const Step<D>& step) {
    return (step.upper() & Bf16::lane(~SIGN)) >> Bf16::FRACTION_BITS;
  }
  static QS_INLINE I16 zeros(const Step<Bf16>& step) { return (step.v & Bf16::lane(~SIGN)) == I16{}; }
  static QS_INLINE I16 zeros(const Step<Fp32>& step) {
    return Bf16::join((step.v[0] & ~SIGN) == I32{}, (step.v[1] & ~SIGN) == I32{});
  }

  void tally(I16 bits, int weight) {
    for (int depth = 0; depth < SHALLOW; depth++) counts_.depths[depth] += weight * lanes_with(bits, depth);
  }

  I16 levels_[FOLD] = {};
#else
  template <class More> void add_depths(const More& more) {
    for (const T *x, *tops; more(&x, &tops);) each(x, tops, 0);
  }
#endif

  bool depths_;
  BlockCounts counts_{};
};

// Counts the blocks of one thread: as they lie in memory where they are whole, else staged.
template <Dtype DTYPE> struct BlockCounters {
  using D = std::conditional_t<DTYPE == FP32, Fp32, Bf16>;

  explicit BlockCounters(bool depths) : direct(depths), staged(depths) {}

  BlockCounter<D> direct;
  BlockCounter<Fp32> staged;
};

template <Dtype DTYPE> void count_rows(const Call& call, int64_t tile, int64_t tiles, BlockCounters<DTYPE>& own) {
  constexpr int MOST = ROW_BLOCKS * COUNTED_BLOCK;
  const int64_t start = tile % tiles * MOST, left = call.length - start, offset = tile / tiles * call.length + start;
  const int count = static_cast<int>(left < MOST ? left : MOST);
  if (DTYPE != FP16 && count % COUNTED_BLOCK == 0) {
    using T = typename BlockCounters<DTYPE>::D::T;
    own.direct.add_rows(static_cast<const T*>(call.x) + offset, count / COUNTED_BLOCK);
    return;
  }
  alignas(WIDTH) float room[MOST];
  stage_in<DTYPE>(call.x, offset, room, count);
  const int blocks = (count + COUNTED_BLOCK - 1) / COUNTED_BLOCK;
  for (int i = count; i < blocks * COUNTED_BLOCK; i++) room[i] = 0;
  own.staged.add_rows(room, blocks);
}

template <Dtype DTYPE>
void count_columns(const Call& call, int64_t tile, int64_t strips, int64_t blocks, BlockCounters<DTYPE>& own) {
  const int64_t first = tile / strips % blocks * COUNTED_BLOCK, begin = tile % strips * HALF_LANES;
  const int64_t corner = (tile / strips / blocks * call.length + first) * call.inner + begin;
  const int width = static_cast<int>(call.inner - begin < HALF_LANES ? call.inner - begin : HALF_LANES);
  const int height = static_cast<int>(call.length - first < COUNTED_BLOCK ? call.length - first : COUNTED_BLOCK);
  if (DTYPE != FP16 && width == HALF_LANES && height == COUNTED_BLOCK) {
    using T = typename BlockCounters<DTYPE>::D::T;
    own.direct.add_columns(static_cast<const T*>(call.x) + corner, call.inner, width);
    return;
  }
  alignas(WIDTH) float room[COUNTED_BLOCK * HALF_LANES] = {};
  for (int r = 0; r < height; r++) stage_in<DTYPE>(call.x, corner + r * call.inner, room + r * HALF_LANES, width);
  own.staged.add_columns(room, HALF_LANES, width);
}

template <Dtype DTYPE> void count_in_blocks(const Call& whole_call, bool depths, BlockCounts& total) {
  Call call = whole_call;
  if (call.inner == 1 && call.length % COUNTED_BLOCK == 0) {  // then all rows are one long row
    call.length *= call.outer;
    call.outer = 1;
  }
  const int64_t blocks = (call.length + COUNTED_BLOCK - 1) / COUNTED_BLOCK;
  const int64_t tiles = (blocks + ROW_BLOCKS - 1) / ROW_BLOCKS, strips = (call.inner + HALF_LANES - 1) / HALF_LANES;
  const int64_t number = call.outer * (call.inner == 1 ? tiles : blocks * strips);
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  {
    BlockCounters<DTYPE> own(depths);
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < number; tile++) {
      if (call.inner == 1)
        count_rows(call, tile, tiles, own);
      else
        count_columns(call, tile, strips, blocks, own);
    }
#pragma omp critical
    {
      own.direct.onto(total);
      own.staged.onto(total);
    }
  }
}

}  // namespace
