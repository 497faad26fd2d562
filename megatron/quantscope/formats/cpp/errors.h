// What a format does to the blocks of a tile, staged as float32 one after the other: quantise them, and compare.
//
// The energies of a block are sums in float64, in an order that does not depend on the machine: element i goes to sum
// i % 8, and the eight are added in pairs. Over the blocks they are added without rounding (`exact.h`).
#pragma once

#include "statistics.h"
#include "tensors.h"

namespace {

constexpr float ROUNDING_SLACK = 0x1p-20f;  // x * scale may come out this much above max where amax is put onto it
constexpr int SUMS = 8;

constexpr int WIDE_SUMS = SUMS * 8 / WIDTH;

// The result, as Python sees it.
struct Damage {
  int64_t underflow, saturated, lost;
  Exact error;
};

// The same of one thread.
struct DamageParts {
  int64_t underflow = 0, saturated = 0, lost = 0;
  ExactParts error{};

  void onto(Damage& total) const {
    total.underflow += underflow;
    total.saturated += saturated;
    total.lost += lost;
    error.onto(total.error);
  }
};

// Where the figures of single blocks go, [outer, blocks, inner] each; null if nobody wants them.
struct BlockFigures {
  float* amax;
  double *error, *signal;
  uint8_t *underflow, *saturated, *lost;
};

QS_INLINE double in_pairs(const F64* sums) {
#if defined(__AVX512F__)
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256((__m512d)sums[0]), _mm512_extractf64x4_pd((__m512d)sums[0], 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return two[0] + two[1];
#else
  double s[SUMS];
  std::memcpy(s, sums, sizeof s);
  return folded(s, [](double a, double b) { return a + b; });
#endif
}

// Squares of `values`, elements start .. start + LANES of a block, onto its sums.
QS_INLINE void add_squares(F64* sums, F32 values, int start) {
  F64 halves[2];
  widened(values, halves);
  for (int h = 0; h < 2; h++) sums[(start + h * LANES / 2) % SUMS / (LANES / 2)] += halves[h] * halves[h];
}

// Three counts in one: a lane of a tile counts up to ROW_BLOCKS * MOST_BLOCK / LANES.
constexpr int COUNT_BITS = 10, COUNT_MASK = (1 << COUNT_BITS) - 1;
constexpr int32_t UNDERFLOW = 1, SATURATED = 1 << COUNT_BITS, LOST = 1 << (2 * COUNT_BITS);
static_assert(ROW_BLOCKS * MOST_BLOCK / LANES <= COUNT_MASK);

// Of a block x of float32 that became y. `top`: the largest value that its elements can have. CLEAN: all of x and y is
// finite.
template <bool CLEAN>
QS_INLINE double compare(const float* x, const float* y, int block, float top, I32& counts, double* signal) {
  F64 error[WIDE_SUMS] = {}, energy[WIDE_SUMS] = {};
  for (int i = 0; i < block; i += LANES) {
    F32 a = load<F32>(x + i), b = load<F32>(y + i);
    if constexpr (!CLEAN) {
      const I32 finite = (as<I32>(a) & ~SIGN) < EXPONENT, both = finite & ((as<I32>(b) & ~SIGN) < EXPONENT);
      counts += finite & ~both & LOST;
      if (signal) add_squares(energy, as<F32>(as<I32>(a) & finite), i);
      a = as<F32>(as<I32>(a) & both);
      b = as<F32>(as<I32>(b) & both);
    } else if (signal) {
      add_squares(energy, a, i);
    }
    counts += (b == F32{}) & (a != F32{}) ? all(UNDERFLOW) : I32{};
    counts += as<F32>(as<I32>(a) & ~SIGN) > top ? all(SATURATED) : I32{};
    add_squares(error, a - b, i);
  }
  if (signal) *signal = in_pairs(energy);
  return in_pairs(error);
}

// A format's way with a tile of whole blocks, and the largest value of each block. It may lose amax.
template <class Scaling> struct BlockedTile {
  BlockedTile(const Rule& rule) : q(rule), max(rule.max), saturates(rule.beyond == rule.max) {}

  void operator()(const float* x, float* y, int blocks, int32_t* amax, float* tops) const {
    const float slack = std::is_same_v<Scaling, PowerOfTwo> ? 1.0f : 1.0f + ROUNDING_SLACK;
    for (int b = 0; b < ROW_BLOCKS; b += LANES) put(tops + b, q.scaling(load<I32>(amax + b)).decode * max * slack);
    rows<Fp32, true, false>(q, x, y, blocks, amax, nullptr);
  }

  Quantizer<Fp32, Scaling> q;
  float max;
  bool saturates;
};

template <class Elements> struct FlatTile {
  FlatTile(const Rule& rule)
      : elements(rule, false), block(rule.block), saturates(rule.beyond == rule.max),
        top(rule.scale == PER_TENSOR ? rule.max * rule.decode * (1.0f + ROUNDING_SLACK) : rule.max) {}

  void operator()(const float* x, float* y, int blocks, int32_t*, float* tops) const {
    flat_tile<Fp32, false>(x, y, blocks * block, elements);
    for (int b = 0; b < ROW_BLOCKS; b++) tops[b] = top;
  }

  Elements elements;
  int block;
  bool saturates;
  float top;
};

// A tile of `blocks` <= ROW_BLOCKS blocks of float32, and where its findings go.
struct MeasuredTile {
  const float* x;
  int block, blocks;
  const int* size;       // elements of each block; what is left of it is zeros
  const int64_t* place;  // of each block's figures
};

// What one block is found to have suffered, with all there is to say of it.
QS_INLINE void block_damage(const MeasuredTile& tile, const float* y, int b, float amax, float top,
                            const BlockFigures& figures, DamageParts& damage) {
  const float *from = tile.x + b * tile.block, *to = y + b * tile.block;
  I32 counts{};
  double signal = 0;
  const double error = compare<false>(from, to, tile.block, top, counts, figures.amax ? &signal : nullptr);
  const int all = total(counts), underflow = all & COUNT_MASK, saturated = all >> COUNT_BITS & COUNT_MASK;
  const bool nan = to[tile.block - 1] != to[tile.block - 1];
  const int lost = (all >> (2 * COUNT_BITS)) - (nan ? tile.block - tile.size[b] : 0);  // not the zeros that were added
  damage.underflow += underflow;
  damage.saturated += saturated;
  damage.lost += lost;
  damage.error.add(error);
  if (!figures.amax) return;
  const int64_t place = tile.place[b];
  figures.amax[place] = amax;
  figures.error[place] = error;
  figures.signal[place] = signal;
  figures.underflow[place] = static_cast<uint8_t>(underflow);
  figures.saturated[place] = static_cast<uint8_t>(saturated);
  figures.lost[place] = static_cast<uint8_t>(lost);
}

// The same for a tile of which only the sums are wanted, and where all is finite before and after.
QS_INLINE void clean_damage(const MeasuredTile& tile, const float* y, const float* tops, DamageParts& damage) {
  I32 counts{};
  double errors[ROW_BLOCKS];
  for (int b = 0; b < tile.blocks; b++)
    errors[b] = compare<true>(tile.x + b * tile.block, y + b * tile.block, tile.block, tops[b], counts, nullptr);
  damage.underflow += total(counts & COUNT_MASK);
  damage.saturated += total(counts >> COUNT_BITS & COUNT_MASK);
  for (int b = 0; b < tile.blocks; b++) damage.error.add(errors[b]);
}

template <class Quantise>
void damage_of(const Quantise& quantise, const MeasuredTile& tile, const BlockFigures& figures, DamageParts& damage) {
  alignas(64) float y[ROW_BLOCKS * MOST_BLOCK], tops[ROW_BLOCKS];
  alignas(64) int32_t amax[ROW_BLOCKS], spent[ROW_BLOCKS];
  largest_of_rows<Fp32>(tile.x, tile.blocks, tile.block, amax);
  std::memcpy(spent, amax, sizeof amax);
  quantise(tile.x, y, tile.blocks, spent, tops);

  I32 unclean = all(figures.amax ? -1 : 0);
  for (int b = 0; b < tile.blocks; b += LANES) {
    const I32 a = load<I32>(amax + b);
    unclean |= a >= EXPONENT;
    if (!quantise.saturates) unclean |= as<F32>(a) > load<F32>(tops + b);
  }
  if (!any(unclean)) return clean_damage(tile, y, tops, damage);
  for (int b = 0; b < tile.blocks; b++) block_damage(tile, y, b, as<float>(amax[b]), tops[b], figures, damage);
}

}  // namespace
