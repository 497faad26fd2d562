// The statistics of a tensor while they are added up, and as they are handed over.
#pragma once

#include "exact.h"

namespace {

constexpr int LEAST_EXPONENT = -149;  // of a float32
constexpr int EXPONENTS = 277;        // up to 127

struct Totals {
  int64_t zero = 0, nan = 0, inf = 0;
  int64_t exponents[EXPONENTS] = {};                      // finite elements but zeros, from LEAST_EXPONENT
  float min = __builtin_inff(), max = -__builtin_inff();  // of the finite elements
  Exact sum{}, squares{};

  void count(int exponent, int64_t times) { exponents[exponent - LEAST_EXPONENT] += times; }

  void add(const Totals& other) {
    zero += other.zero;
    nan += other.nan;
    inf += other.inf;
    for (int i = 0; i < EXPONENTS; i++) exponents[i] += other.exponents[i];
    min = other.min < min ? other.min : min;
    max = other.max > max ? other.max : max;
    sum.add(other.sum);
    squares.add(other.squares);
  }
};

// The same as Python sees it. `cpp_measure.Summary` is the same structure.
struct Summary {
  int64_t zero, nan, inf;
  int64_t exponents[EXPONENTS];
  int32_t first, last;  // places in `exponents` around all that are not 0
  float min, max;
  uint32_t sum[LIMBS], squares[LIMBS];
};

inline void summarise(const Totals& totals, Summary& to) {
  to.zero = totals.zero;
  to.nan = totals.nan;
  to.inf = totals.inf;
  std::memcpy(to.exponents, totals.exponents, sizeof to.exponents);
  to.first = 0;
  to.last = EXPONENTS;
  while (to.last && !to.exponents[to.last - 1]) to.last--;
  while (to.first < to.last && !to.exponents[to.first]) to.first++;
  to.min = totals.min;
  to.max = totals.max;
  totals.sum.digits(to.sum);
  totals.squares.digits(to.squares);
}

}  // namespace
