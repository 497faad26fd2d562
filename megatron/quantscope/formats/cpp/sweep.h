// Thousands of elements counted by vectors (`statistics.h`), exactly: those in the 16 binades from the largest down.
//
// Counts. An element's binade is one bit of sixteen. The bits of 16 vectors are added by carry-save adders, so that one
// population count a bit serves for 16 elements. bf16 has lanes of 16 bits; of float32, the upper halves of two vectors
// make one.
//
// Sums. Digits of a float32 span 24 + 15 bits there, so float64 adds up to 2^14 of them without rounding. Squares span
// 78 bits, too many for one float64, and two are enough: a large one that starts at a power of two so high that all
// sums end at the same bit, and a small one for what is cut off. With
//
//     after = before + x * x        rounded to that bit
//     small += x * x - (after - before)
//
// nothing is lost: differences of neighbours in a binade are exact, and so is a square of 24 bits. bf16 has squares of
// 46 bits, and 128 of them fit one float64.
#pragma once

#include "elements.h"
#include "totals.h"

#if defined(QS_SWEEPS)

namespace {

constexpr int WINDOW = 16;                       // binades
constexpr int FOLD = 4;                          // levels of adders
constexpr int GROUP = (1 << FOLD) * HALF_LANES;  // elements that they take at a time
constexpr int LINE = 64;                         // bytes of the cache
constexpr int MOST_SWEPT = 64 * WIDTH;           // elements that the sums have room for

// HALF_LANES neighbours. `outside` is by lanes of 16 bits; rest(bits, mask) gets the vectors as they lie in memory.
template <class D> struct Step;

template <> struct Step<Bf16> {
  I16 v;

  explicit Step(const uint16_t* x) : v(load<I16>(x)) {}
  QS_INLINE I16 upper() const { return v; }
  QS_INLINE F32 part(int which) const { return Bf16::part(v, which); }
  template <class Rest> QS_INLINE void drop(I16 outside, const Rest& rest) {
    rest(v, outside);
    v &= ~outside;
  }
};

template <> struct Step<Fp32> {
  I32 v[2];

  explicit Step(const float* x) : v{load<I32>(x), load<I32>(x + LANES)} {}
  QS_INLINE I16 upper() const { return Bf16::join(v[0], v[1]); }
  QS_INLINE F32 part(int which) const { return as<F32>(v[which]); }
  template <class Rest> QS_INLINE void drop(I16 outside, const Rest& rest) {
    const I32 masks[2] = {as<I32>(outside) << 16 >> 16, as<I32>(outside) >> 16};
    for (int which = 0; which < 2; which++) {
      rest(v[which], masks[which]);
      v[which] &= ~masks[which];
    }
  }
};

// a * b + c, where the product is exact: rounded once in any case.
QS_INLINE F64 product_plus(F64 a, F64 b, F64 c) {
#if defined(QS_AVX512)
  return (F64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
  return a * b + c;
#endif
}

// 2^LEVEL vectors of one bit each, from next(), added onto `levels`: what stays behind is there, the carry is returned.
template <int LEVEL, class Next> QS_INLINE I16 added(I16* levels, const Next& next) {
  if constexpr (LEVEL == 0) {
    return next();
  } else {
    const I16 a = added<LEVEL - 1>(levels, next), b = added<LEVEL - 1>(levels, next), c = levels[LEVEL - 1];
    levels[LEVEL - 1] = parity(a, b, c);
    return majority(a, b, c);
  }
}

template <class D> class Sweep {
  static constexpr bool SPLIT = D::FRACTION_BITS == FRACTION;  // squares in two parts
  static constexpr int SUMS = SPLIT ? 2 : 4;                   // of vectors: an addition waits for the one before
  static constexpr int DIGITS = D::FRACTION_BITS + WINDOW;     // of an element, in units
  static constexpr int16_t BEYOND = -WINDOW;                   // bits of places below the top that are no places
  static constexpr int TERM_BITS = SPLIT ? 8 : 7;
  static constexpr int TOP = 2 * DIGITS + TERM_BITS, CUT = TOP - 52;  // bits where the large sums begin and end
  static_assert(MOST_SWEPT == SUMS * WIDTH / 8 << TERM_BITS);
  static_assert(DIGITS + TERM_BITS <= 53);
  static_assert(SPLIT ? CUT + TERM_BITS <= 53 : TOP <= 53);

 public:
  // `top`: the exponent field of the largest magnitude, no less than WINDOW.
  explicit Sweep(int top)
      : top_(all(static_cast<int16_t>(top))), field_(top), unit_(top - WINDOW + 1 - BIAS - D::FRACTION_BITS) {
    for (F64& large : state_.squares) large += start();
  }

  // n elements, a multiple of GROUP, at most MOST_SWEPT in all. rest(bits, mask): lanes that were left out.
  template <class Rest> void add(const typename D::T* x, int n, const Rest& rest) {
    State state = state_;  // in registers
    for (int i = 0; i < n; i += GROUP) {
      const auto* from = x + i;
      const auto next = [&]() __attribute__((always_inline)) { return one(state, &from, rest); };
      tally(added<FOLD>(state.levels, next), 1 << FOLD);
    }
    state_ = state;
  }

  // Once, when all is added.
  void onto(Totals& totals) {
    for (int level = 0; level < FOLD; level++) tally(state_.levels[level], 1 << level);
    for (int r = 0; r < WINDOW; r++) totals.count(field_ - r - BIAS, counts_[r]);
    for (F64& large : state_.squares) large -= start();
    totals.sum.add(whole(state_.sums, unit_), unit_);
    totals.squares.add(whole(state_.squares, 2 * unit_ + (SPLIT ? CUT : 0)), 2 * unit_ + (SPLIT ? CUT : 0));
    if (SPLIT) totals.squares.add(whole(state_.small, 2 * unit_), 2 * unit_);
  }

 private:
  struct State {
    I16 levels[FOLD] = {};
    F64 sums[SUMS] = {}, squares[SUMS] = {}, small[SUMS] = {};
  };

  static double power(int exponent) { return as<double>(static_cast<int64_t>(1023 + exponent) << 52); }
  double start() const { return SPLIT ? power(2 * unit_ + TOP) : 0; }

  template <class Rest> QS_INLINE I16 one(State& state, const typename D::T** x, const Rest& rest) {
    Step<D> step(*x);
    // What follows in memory is likely to be next, and can be fetched meanwhile.
    for (int byte = 0; byte < static_cast<int>(sizeof step); byte += LINE)
      __builtin_prefetch(reinterpret_cast<const char*>(*x + MOST_SWEPT) + byte);
    *x += HALF_LANES;
    const I16 below = top_ - ((step.upper() & Bf16::lane(~SIGN)) >> Bf16::FRACTION_BITS);
    const I16 outside = below & BEYOND;
    if (__builtin_expect(any(outside), 0)) step.drop(outside != I16{}, rest);
    for (int which = 0; which < 2; which++) {
      F64 halves[2];
      widened(step.part(which), halves);
      for (int h = 0; h < 2; h++) add(state, halves[h], (2 * which + h) % SUMS);
    }
    return power_of_two(below);
  }

  static QS_INLINE void add(State& state, F64 x, int to) {
    const F64 before = state.squares[to], after = product_plus(x, x, before);
    state.sums[to] += x;
    state.squares[to] = after;
    if (SPLIT) state.small[to] += product_plus(x, x, before - after);
  }

  void tally(I16 bits, int weight) {
    for (int r = 0; r < WINDOW; r++) counts_[r] += weight * lanes_with(bits, r);
  }

  // In units of 2^exponent.
  static int64_t whole(const F64 (&sums)[SUMS], int exponent) {
    I64 total{};
    for (const F64& sum : sums) total += __builtin_convertvector(sum * power(-exponent), I64);
    int64_t result = 0;
    for (int lane = 0; lane < WIDTH / 8; lane++) result += total[lane];
    return result;
  }

  I16 top_;
  int field_, unit_;
  State state_;
  int64_t counts_[WINDOW] = {};
};

}  // namespace

#endif
