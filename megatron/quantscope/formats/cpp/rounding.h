// Magnitudes rounded to the values of an element, without log2, exp2 or division; `rounding.py` says why this is exact.
//
//   half even   (a + c) - c with c = 2^(e + 23 - m): the adder drops what is worth less than 2^(e - m). e is held at
//               emin and above, so that subnormals fall on their even grid, and at emax + 1, so that c is finite.
//   half away   (bits + half) & keep: a carry out of the fraction runs into the exponent, as it should. half and keep
//               follow from |e|. In 16-bit lanes the same integers do bf16 twice as fast.
#pragma once

#include <type_traits>

#include "lanes.h"
#include "rule.h"

namespace {

class HalfEven {
 public:
  HalfEven(int mantissa_bits, int emin, int emax)
      : lowest_(all((BIAS + emin) << FRACTION)),
        highest_(all((BIAS + emax + 1) << FRACTION)),
        raised_(all((FRACTION - mantissa_bits) << FRACTION)) {}

  QS_INLINE F32 operator()(F32 a) const {
    const F32 c = as<F32>(smaller(larger(as<I32>(a) & EXPONENT, lowest_), highest_) + raised_);
    return (a + c) - c;
  }

 private:
  I32 lowest_, highest_, raised_;
};

// V: I32 for float32, I16 for bf16.
template <class V> class HalfAway {
  using Lane = std::remove_reference_t<decltype(V{}[0])>;
  static constexpr int BITS = 8 * sizeof(Lane);
  static constexpr int KEPT_FRACTION = FRACTION - (32 - BITS);
  static constexpr int COUNT = WIDTH / static_cast<int>(sizeof(Lane));
  static constexpr int BINADES = 32;           // of the tables by |e|; the last one stands for all beyond
  static constexpr bool TABLES = WIDTH == 64;  // two look-ups beat the chain of comparisons

  static constexpr Lane top(int32_t bits) { return static_cast<Lane>(bits >> (32 - BITS)); }

 public:
  explicit HalfAway(const Rule& rule) : rule_(rule) {
    Lane half = static_cast<Lane>(1 << (KEPT_FRACTION - rule.mantissa_bits - 1));
    first_half_ = half;
    for (int e = 0, band = 0; e < BINADES; e++) {
      while (band < BANDS && e > rule.limit[band]) half = static_cast<Lane>(half << rule.drop[band++]);
      if (e == rule.emax) overflow_ = static_cast<Lane>(top(as<int32_t>(rule.max)) + half);
      half_[e] = band < BANDS ? half : e == rule.limit[BANDS - 1] + 1 ? static_cast<Lane>(1 << KEPT_FRACTION) : Lane{};
      keep_[e] = static_cast<Lane>(band < BANDS ? -2 * half : -half_[e]);
    }
    beyond_ = top(as<int32_t>(rule.beyond));
    smallest_ = top(as<int32_t>(rule.smallest));
  }

  // Of values with their signs.
  QS_INLINE V operator()(V x) const {
    const V sign = x & top(SIGN), a = x & static_cast<Lane>(~top(SIGN));
    V e = (a >> KEPT_FRACTION) - static_cast<Lane>(BIAS);
    e = e < V{} ? -e : e;
    V r;
    if constexpr (TABLES) {
      const V row = smaller(e, all(static_cast<Lane>(BINADES - 1)));
      r = (a + look_up(half_, row)) & look_up(keep_, row);
    } else {
      V half = all(first_half_);
      for (int i = 0; i < BANDS - 1; i++) half = e > static_cast<Lane>(rule_.limit[i]) ? half << rule_.drop[i] : half;
      r = larger((a + half) & -(half + half), all(smallest_));
      r = a < static_cast<Lane>(smallest_ - (1 << KEPT_FRACTION)) ? V{} : r;  // less than half of it
    }
    r = a >= overflow_ ? all(beyond_) : r;
    r = a > top(EXPONENT) ? all(top(QUIET_NAN)) : r;
    if (rule_.negative_zero) return r | sign;
    return r | (r == V{} ? V{} : sign);
  }

 private:
  static QS_INLINE V look_up([[maybe_unused]] const Lane* table, V row) {
#if defined(QS_AVX512)
    if constexpr (sizeof(Lane) == 2) return (V)_mm512_permutexvar_epi16((__m512i)row, load<__m512i>(table));
    if constexpr (sizeof(Lane) == 4)
      return (V)_mm512_permutex2var_epi32(load<__m512i>(table), (__m512i)row, load<__m512i>(table + COUNT));
#endif
    return row;  // there are no tables
  }

  Rule rule_;
  alignas(64) Lane half_[BINADES], keep_[BINADES];
  Lane first_half_, overflow_, beyond_, smallest_;
};

}  // namespace
