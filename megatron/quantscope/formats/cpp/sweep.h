// AVX-512: a sweep of bf16 counted by vectors, exactly as `statistics.h` does it one by one, three times as fast.
//
// Nearly all elements of a sweep lie in 16 binades below the largest. Of those, an element's binade becomes one bit of
// sixteen, and the bits of 16 vectors are added by carry-save adders, so that one population count a bit serves for 16
// elements. Their digits span 23 bits, so float64 adds them without rounding, and 128 of their squares too.
// The others, zeros and what is below, are told to the caller.
#pragma once

#include "exact.h"

#if defined(QS_AVX512)

namespace {

constexpr int WINDOW = 16;                       // binades
constexpr int FOLD = 4;                          // levels of adders
constexpr int GROUP = (1 << FOLD) * HALF_LANES;  // elements that they take at a time
constexpr int MOST_SWEPT = 4096;                 // elements whose squares add up below 2^53

typedef int64_t I64 __attribute__((vector_size(WIDTH)));

class Sweep {
 public:
  // `top`: the exponent field of the largest magnitude, no less than WINDOW.
  explicit Sweep(int top) : top_(_mm512_set1_epi16(static_cast<short>(top))), unit_(top - WINDOW + 1 - BIAS - 7) {}

  // n elements, a multiple of GROUP, at most MOST_SWEPT in all. rest(mask, place): elements that were left out.
  template <class Rest> void add(const uint16_t* x, int n, const Rest& rest) {
    State state = state_;  // in registers
    for (int i = 0; i < n; i += GROUP) {
      int place = i;
      const auto next = [&]() __attribute__((always_inline)) { return one(state, x, &place, rest); };
      tally(take<FOLD>(state, next), 1 << FOLD);
    }
    state_ = state;
  }

  // counts[r]: elements r binades below the top; sum and squares are added to.
  void into(int64_t (&counts)[WINDOW], Exact& sum, Exact& squares) {
    for (int level = 0; level < FOLD; level++) tally(state_.levels[level], 1 << level);
    for (int r = 0; r < WINDOW; r++) counts[r] = counts_[r];
    sum.add(whole(state_.sums, -unit_), unit_);
    squares.add(whole(state_.squares, -2 * unit_), 2 * unit_);
  }

 private:
  struct State {
    __m512i levels[FOLD] = {};
    F64 sums[4] = {}, squares[4] = {};
  };

  // 2^LEVEL vectors of one bit each, added: what stays behind is in the levels, the carry is returned.
  template <int LEVEL, class Next> static QS_INLINE __m512i take(State& state, const Next& next) {
    if constexpr (LEVEL == 0) {
      return next();
    } else {
      const __m512i a = take<LEVEL - 1>(state, next), b = take<LEVEL - 1>(state, next);
      const __m512i c = state.levels[LEVEL - 1];
      state.levels[LEVEL - 1] = _mm512_ternarylogic_epi64(a, b, c, 0x96);  // a ^ b ^ c
      return _mm512_ternarylogic_epi64(a, b, c, 0xe8);                     // at least two of them
    }
  }

  template <class Rest> QS_INLINE __m512i one(State& state, const uint16_t* x, int* place, const Rest& rest) {
    const __m512i v = _mm512_loadu_si512(x + *place);
    const __m512i field = _mm512_srli_epi16(_mm512_slli_epi16(v, 1), 8), below = _mm512_sub_epi16(top_, field);
    const __mmask32 inside = _mm512_cmplt_epu16_mask(below, _mm512_set1_epi16(WINDOW));
    if (__builtin_expect(inside != 0xffffffff, 0)) rest(~inside, *place);
    const I32 kept = (I32)_mm512_maskz_mov_epi16(inside, v);
    add_part(state, as<F32>(kept << 16), 0);
    add_part(state, as<F32>(kept & UPPER), 2);
    *place += HALF_LANES;
    return _mm512_sllv_epi16(_mm512_set1_epi16(1), below);
  }

  static QS_INLINE void add_part(State& state, F32 part, int first) {
    F64 halves[2];
    widened(part, halves);
    for (int h = 0; h < 2; h++) {
      const __m512d half = (__m512d)halves[h];
      state.sums[first + h] += halves[h];
      state.squares[first + h] = (F64)_mm512_fmadd_pd(half, half, (__m512d)state.squares[first + h]);
    }
  }

  void tally(__m512i bits, int weight) {
    for (int r = 0; r < WINDOW; r++)
      counts_[r] +=
          weight * __builtin_popcount(_mm512_test_epi16_mask(bits, _mm512_set1_epi16(static_cast<short>(1 << r))));
  }

  // Sums in units of 2^-exponent.
  static int64_t whole(const F64 (&sums)[4], int exponent) {
    const double units = as<double>(static_cast<int64_t>(1023 + exponent) << 52);
    I64 total{};
    for (const F64& sum : sums) total += __builtin_convertvector(sum * units, I64);
    int64_t result = 0;
    for (int lane = 0; lane < WIDTH / 8; lane++) result += total[lane];
    return result;
  }

  __m512i top_;
  int unit_;
  State state_;
  int64_t counts_[WINDOW] = {};
};

}  // namespace

#endif
