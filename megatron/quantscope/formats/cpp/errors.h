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
constexpr int32_t NEAR_OVERFLOW = 252 << FRACTION;  // bits of 2^125: rounded up by a format, it is still finite

constexpr int WIDE_SUMS = SUMS * 8 / WIDTH;

// The result, as Python sees it.
struct Damage {
  int64_t underflow, saturated, lost, dead;
  Exact error;
};

// The same of one thread.
struct DamageParts {
  int64_t underflow = 0, saturated = 0, lost = 0, dead = 0;
  ExactParts error{};

  void onto(Damage& total) const {
    total.underflow += underflow;
    total.saturated += saturated;
    total.lost += lost;
    total.dead += dead;
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
#if defined(QS_AVX512)
  const __m256d four =
      _mm256_add_pd(_mm512_castpd512_pd256((__m512d)sums[0]), _mm512_extractf64x4_pd((__m512d)sums[0], 1));
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

// Marks for a vector a that became b; `top` is the largest value that its elements can have.
QS_INLINE I32 marks(F32 a, F32 b, float top) {
  return (((b == F32{}) & (a != F32{})) ? all(UNDERFLOW) : I32{}) +
         (((as<F32>(as<I32>(a) & ~SIGN) > top) & (b != F32{})) ? all(SATURATED) : I32{});
}

// A format's way with a tile of whole blocks of float32, or of bf16 where its values are bf16.
template <class Scaling> struct BlockedTile {
  static constexpr bool GIVES_BF16 = std::is_same_v<Scaling, PowerOfTwo>;

  explicit BlockedTile(const Rule& rule)
      : narrow(rule), wide(rule), max(rule.max), block(rule.block), saturates(rule.beyond == rule.max) {}

  // The largest value that each block can have.
  void tops(const int32_t* amax, float* to) const {
    const float slack = GIVES_BF16 ? 1.0f : 1.0f + ROUNDING_SLACK;
    for (int b = 0; b < ROW_BLOCKS; b += LANES) put(to + b, wide.scaling(load<I32>(amax + b)).decode * max * slack);
  }

  // amax is lost.
  void operator()(const uint16_t* x, uint16_t* y, int blocks, int16_t* amax) const {
    rows<Bf16, true, false>(narrow, x, y, blocks, amax, nullptr);
  }
  void operator()(const float* x, float* y, int blocks, int32_t* amax) const {
    rows<Fp32, true, false>(wide, x, y, blocks, amax, nullptr);
  }

  Quantizer<Bf16, Scaling> narrow;
  Quantizer<Fp32, Scaling> wide;
  float max;
  int block;
  bool saturates;
};

template <class Elements> struct FlatTile {
  static constexpr bool GIVES_BF16 = std::is_same_v<Elements, AwayElements>;

  explicit FlatTile(const Rule& rule)
      : elements(rule, false),
        block(rule.block),
        saturates(rule.beyond == rule.max),
        top(rule.scale == PER_TENSOR ? rule.max * rule.decode * (1.0f + ROUNDING_SLACK) : rule.max) {}

  void tops(const int32_t*, float* to) const {
    for (int b = 0; b < ROW_BLOCKS; b++) to[b] = top;
  }
  void operator()(const uint16_t* x, uint16_t* y, int blocks, int16_t*) const {
    flat_tile<Bf16, false>(x, y, blocks * block, elements);
  }
  void operator()(const float* x, float* y, int blocks, int32_t*) const {
    flat_tile<Fp32, false>(x, y, blocks * block, elements);
  }

  Elements elements;
  int block;
  bool saturates;
  float top;
};

// A tile of `blocks` <= ROW_BLOCKS blocks, with their largest magnitudes, as many formats look at it.
template <class D> struct LookedAt {
  LookedAt(const typename D::T* from, int blocks, int block) : x(from), blocks(blocks) {
    largest_of_rows<D>(x, blocks, block, amax);
    for (int b = 0; b < ROW_BLOCKS; b++) wide_amax[b] = D::widened(amax[b]);
    I32 near{};
    for (int b = 0; b < ROW_BLOCKS; b += LANES) near |= load<I32>(wide_amax + b) >= NEAR_OVERFLOW;
    tame = !any(near);
  }

  const typename D::T* x;
  int blocks;
  bool tame;  // finite, and not about to overflow
  alignas(64) typename D::Lane amax[ROW_BLOCKS];
  alignas(64) int32_t wide_amax[ROW_BLOCKS];
};

// The quick way, for whole blocks where all is finite before and after, if the figures of blocks are not wanted. False,
// and nothing is done, where something is not finite or may not stay so.
template <class D, class Quantise>
bool clean_damage(const Quantise& quantise, const LookedAt<D>& tile, DamageParts& damage) {
  if (!tile.tame) return false;
  const int block = quantise.block;
  alignas(64) typename D::T y[ROW_BLOCKS * MOST_BLOCK];
  alignas(64) typename D::Lane amax[ROW_BLOCKS];
  alignas(64) float tops[ROW_BLOCKS];
  quantise.tops(tile.wide_amax, tops);
  if (!quantise.saturates) {
    I32 beyond{};
    for (int b = 0; b < ROW_BLOCKS; b += LANES) beyond |= load<F32>(tile.wide_amax + b) > load<F32>(tops + b);
    if (any(beyond)) return false;
  }

  std::memcpy(amax, tile.amax, sizeof amax);
  quantise(tile.x, y, tile.blocks, amax);
  I32 counts{};
  double errors[ROW_BLOCKS];
  for (int b = 0; b < tile.blocks; b++) {
    F64 sums[WIDE_SUMS] = {};
    for (int i = b * block; i < (b + 1) * block; i += D::COUNT) {
      const auto v = load<typename D::Bits>(tile.x + i), w = load<typename D::Bits>(y + i);
      F32 difference[D::FLOATS];
      for (int which = 0; which < D::FLOATS; which++) {
        const F32 a = D::part(v, which), c = D::part(w, which);
        counts += marks(a, c, tops[b]);
        difference[which] = a - c;
      }
      if constexpr (D::FLOATS == 2) interleaved(difference[0], difference[1], difference);
      for (int part = 0; part < D::FLOATS; part++) add_squares(sums, difference[part], i + part * LANES);
    }
    errors[b] = in_pairs(sums);
  }
  const int underflow = total(counts & COUNT_MASK);
  damage.underflow += underflow;
  damage.saturated += total(counts >> COUNT_BITS & COUNT_MASK);
  for (int b = 0; b < tile.blocks; b++) damage.error.add(errors[b]);
  if (underflow < 1) return true;
  largest_of_rows<D>(y, tile.blocks, block, amax);
  for (int b = 0; b < tile.blocks; b++) damage.dead += tile.amax[b] && !amax[b];
  return true;
}

// A tile of `blocks` <= ROW_BLOCKS blocks of float32, and where the figures of each go.
struct MeasuredTile {
  alignas(64) float x[ROW_BLOCKS * MOST_BLOCK];
  int blocks;
  int size[ROW_BLOCKS];  // elements of each block; what is left of it is zeros
  int64_t place[ROW_BLOCKS];
};

// The thorough way: every block by itself, with all there is to say of it.
template <class Quantise>
void damage_of(const Quantise& quantise, const MeasuredTile& tile, const BlockFigures& figures, DamageParts& damage) {
  const int block = quantise.block;
  alignas(64) float y[ROW_BLOCKS * MOST_BLOCK], tops[ROW_BLOCKS];
  alignas(64) int32_t amax[ROW_BLOCKS], spent[ROW_BLOCKS];
  largest_of_rows<Fp32>(tile.x, tile.blocks, block, amax);
  std::memcpy(spent, amax, sizeof amax);
  quantise.tops(amax, tops);
  quantise(tile.x, y, tile.blocks, spent);
  for (int b = 0; b < tile.blocks; b++) {
    const float *from = tile.x + b * block, *to = y + b * block;
    F64 error[WIDE_SUMS] = {}, signal[WIDE_SUMS] = {};
    I32 counts{}, left{};
    for (int i = 0; i < block; i += LANES) {
      const I32 v = load<I32>(from + i), w = load<I32>(to + i);
      const I32 finite = (v & ~SIGN) < EXPONENT, both = finite & ((w & ~SIGN) < EXPONENT);
      const F32 a = as<F32>(v & both), c = as<F32>(w & both);
      counts += marks(a, c, tops[b]) + (finite & ~both & LOST);
      left |= w & ~SIGN;
      add_squares(error, a - c, i);
      add_squares(signal, as<F32>(v & finite), i);
    }
    const int all = total(counts), underflow = all & COUNT_MASK, saturated = all >> COUNT_BITS & COUNT_MASK;
    const bool nan = to[block - 1] != to[block - 1];
    const int lost = (all >> (2 * COUNT_BITS)) - (nan ? block - tile.size[b] : 0);  // not the zeros that were added
    damage.underflow += underflow;
    damage.saturated += saturated;
    damage.lost += lost;
    damage.dead += underflow && !any(left);
    damage.error.add(in_pairs(error));
    if (!figures.amax) continue;
    const int64_t place = tile.place[b];
    figures.amax[place] = as<float>(amax[b]);
    figures.error[place] = in_pairs(error);
    figures.signal[place] = in_pairs(signal);
    figures.underflow[place] = static_cast<uint8_t>(underflow);
    figures.saturated[place] = static_cast<uint8_t>(saturated);
    figures.lost[place] = static_cast<uint8_t>(lost);
  }
}

}  // namespace
