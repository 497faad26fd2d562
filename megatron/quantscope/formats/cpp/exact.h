// Sums without rounding: a long fixed-point number, from the smallest float64 upwards, in limbs of 32 bits. Carries
// wait in the upper halves of 64. Additions in any order give the same number.
#pragma once

#include "lanes.h"

namespace {

constexpr int LOWEST = 1074;  // 2^-1074 is the unit
constexpr int LIMBS = 72;     // up to 2^1024 and beyond

struct Exact {
  int64_t limb[LIMBS];

  // value * 2^exponent, exponent >= -LOWEST.
  void add(int64_t value, int exponent) {
    const int place = exponent + LOWEST, i = place >> 5;
    const __int128 wide = static_cast<__int128>(value) << (place & 31);
    limb[i] += static_cast<uint32_t>(wide);
    limb[i + 1] += static_cast<uint32_t>(wide >> 32);
    limb[i + 2] += static_cast<int64_t>(wide >> 64);
  }

  void add(const Exact& other) {
    for (int i = 0; i < LIMBS; i++) limb[i] += other.limb[i];
  }

  // With the carries passed on: a number of 32 * LIMBS bits, negative ones as their complement.
  void digits(uint32_t* to) const {
    int64_t carry = 0;
    for (int i = 0; i < LIMBS; i++) {
      const __int128 wide = static_cast<__int128>(limb[i]) + carry;
      to[i] = static_cast<uint32_t>(wide);
      carry = static_cast<int64_t>(wide >> 32);
    }
  }
};

// Many numbers on the way there: two additions each, into the row of its exponent.
class ExactParts {
 public:
  // A finite number >= 0.
  QS_INLINE void add(double value) {
    const int64_t bits = as<int64_t>(value), field = bits >> FRACTION_BITS, fraction = bits & (ONE - 1);
    low_[field] += fraction & (LOW - 1);
    high_[field] += (field ? fraction | ONE : fraction) >> LOW_BITS;
  }

  void onto(Exact& total) const {
    for (int field = 0; field < FIELDS; field++) {
      if (!(low_[field] | high_[field])) continue;
      const int exponent = (field ? field : 1) - 1 - LOWEST;
      total.add(low_[field], exponent);
      total.add(high_[field], exponent + LOW_BITS);
    }
  }

 private:
  static constexpr int FRACTION_BITS = 52, FIELDS = 2048, LOW_BITS = 26;
  static constexpr int64_t ONE = 1ll << FRACTION_BITS, LOW = 1ll << LOW_BITS;
  int64_t low_[FIELDS] = {}, high_[FIELDS] = {};
};

}  // namespace
