// What a tensor holds, counted exactly: by vectors where the machine has them (`sweep.h`), else by tables (`tables.h`).
//
// A sweep takes the binades near the largest element. What lies far below it is gathered until it is worth a sweep of
// its own, with a largest element of its own, and so on; the 16 lowest binades of all are whole numbers of few bits.
// So every element is swept once or, of ordinary tensors one in thousands, twice; and nothing is ever rounded.
#pragma once

#include <algorithm>
#include <memory>

#include "staging.h"
#include "sweep.h"
#include "tables.h"

namespace {

#if defined(QS_SWEEPS)

template <class D> class SweptCounter {
  using Lane = typename D::Lane;
  using Bits = typename D::Bits;
  using Unsigned = typename D::Unsigned;
  using Tables = TableCounter<std::make_unsigned_t<Lane>, Bits, D::FRACTION_BITS, BIAS>;
  static constexpr Lane INF = static_cast<Lane>(D::lane(EXPONENT)), MAGNITUDE = static_cast<Lane>(~D::lane(SIGN));
  static constexpr int MOST = MOST_SWEPT, MANY = MOST / 4, NOT_FINITE = 2 * BIAS + 1;

 public:
  using Element = typename D::T;

  void add(const Element* x, int64_t n) {
    if (held_) {
      const int taken = static_cast<int>(n < MOST - held_ ? n : MOST - held_);
      hold(x, taken);
      x += taken;
      n -= taken;
    }
    for (; n >= MOST; x += MOST, n -= MOST) count(x, MOST);
    hold(x, static_cast<int>(n));
  }

  // Once, when all is added.
  const Totals& totals() {
    if (held_) count_padded(held_buffer_, held_);
    while (left_) {
      const int n = left_ < MOST ? left_ : MOST;
      left_ -= n;
      count_padded(left_buffer_ + left_, n);
    }
    if (tables_) totals_.add(tables_->totals());
    if (least_ <= most_) {
      totals_.min = value(least_);
      totals_.max = value(most_);
    }
    return totals_;
  }

 private:
  static Lane key(Lane bits) { return bits ^ ((bits >> (8 * sizeof(Lane) - 1)) & MAGNITUDE); }  // in order of values
  static float value(Lane key_of_it) { return as<float>(D::widened(key(key_of_it))); }

  // What is too little for a sweep waits.
  void hold(const Element* x, int n) {
    std::memcpy(held_buffer_ + held_, x, n * sizeof(Element));
    held_ += n;
    if (held_ < MOST) return;
    held_ = 0;
    count(held_buffer_, MOST);
  }

  void count(const Element* x, int n) { count(x, n, look(x, n)); }

  // Any number of elements, with room for a whole group of them.
  void count_padded(Element* x, int n) {
    const int whole = (n + GROUP - 1) / GROUP * GROUP;
    std::fill(x + n, x + whole, x[n - 1]);
    const int top = look(x, whole);
    std::fill(x + n, x + whole, as<Element>(top == NOT_FINITE ? INF : Lane{}));
    (top == NOT_FINITE ? totals_.inf : totals_.zero) -= whole - n;
    count(x, whole, top);
  }

  // n elements, whole groups; `top` is the exponent field of the largest magnitude.
  void count(const Element* x, int n, int top) {
    if (top == NOT_FINITE) return separate(x, n);
    if (top < WINDOW) return count_lowest(x, n);
    const int before = left_;
    Sweep<D> sweep(top);
    sweep.add(x, n, [&](Bits v, Bits outside) __attribute__((noinline)) {
      const uint32_t zeros = bit_a_lane((v & MAGNITUDE) == Bits{}), wanted = bit_a_lane(outside) & ~zeros;
      totals_.zero += __builtin_popcount(zeros);
      left_ += gathered(left_buffer_ + left_, v, wanted);
    });
    sweep.onto(totals_);
    if (left_ - before > MANY) {
      if (!tables_) tables_.reset(new Tables);
      tables_->add(reinterpret_cast<const typename Tables::Element*>(left_buffer_ + before), left_ - before);
      left_ = before;
    }
    if (left_ < MOST) return;
    left_ -= MOST;
    count(left_buffer_ + left_, MOST);  // whose own rest goes where they were read
  }

  // The exponent field of the largest magnitude. If all are finite, they count for the extremes.
  int look(const Element* x, int n) {
    Bits largest = all(static_cast<Lane>(~MAGNITUDE));  // of those that are not negative, if there are any
    Unsigned most{}, least = ~Unsigned{};               // of the bits: negative ones are above all others
    for (int i = 0; i < n; i += D::COUNT) {
      const Bits v = load<Bits>(x + i);
      largest = larger(largest, v);
      most = larger(most, as<Unsigned>(v));
      least = smaller(least, as<Unsigned>(v));
    }
    using Word = std::make_unsigned_t<Lane>;
    const Lane high = folded_by<Lane>(largest, [](Lane a, Lane b) { return a > b ? a : b; });
    const Word top = folded_by<Word>(most, [](Word a, Word b) { return a > b ? a : b; });
    const Word bottom = folded_by<Word>(least, [](Word a, Word b) { return a < b ? a : b; });
    const Lane negative = static_cast<Lane>(top), amax = std::max<Lane>(high, top & MAGNITUDE);
    if (amax >= INF) return NOT_FINITE;
    least_ = std::min(least_, key(negative < 0 ? negative : static_cast<Lane>(bottom)));
    most_ = std::max(most_, key(high >= 0 ? high : static_cast<Lane>(bottom)));
    return amax >> D::FRACTION_BITS;
  }

  // Elements among which some are not finite: these are counted, and the others are by themselves.
  void separate(const Element* x, int n) {
    alignas(WIDTH) Element finite[MOST + D::COUNT];
    int count = 0;
    for (int i = 0; i < n; i += D::COUNT) {
      const Bits v = load<Bits>(x + i), a = v & MAGNITUDE;
      totals_.inf += __builtin_popcount(bit_a_lane(a == INF));
      totals_.nan += __builtin_popcount(bit_a_lane(a > INF));
      count += gathered(finite + count, v, bit_a_lane(a < INF));
    }
    if (count) count_padded(finite, count);
  }

  // Elements of the 16 lowest exponent fields, as whole numbers of the smallest.
  void count_lowest(const Element* x, int n) {
    constexpr int UNIT = 1 - BIAS - D::FRACTION_BITS;
    constexpr int64_t ONE = 1ll << D::FRACTION_BITS;
    int64_t sum = 0;
    unsigned __int128 squares = 0;
    for (int i = 0; i < n; i++) {
      const Lane bits = as<Lane>(x[i]);
      const int field = (bits & MAGNITUDE) >> D::FRACTION_BITS;
      const int64_t fraction = bits & (ONE - 1), units = field ? (fraction | ONE) << (field - 1) : fraction;
      if (units)
        totals_.count(63 - __builtin_clzll(units) + UNIT, 1);
      else
        totals_.zero++;
      sum += bits < 0 ? -units : units;
      squares += static_cast<unsigned __int128>(units) * units;
    }
    totals_.sum.add(sum, UNIT);
    totals_.squares.add(static_cast<int64_t>(squares & UINT32_MAX), 2 * UNIT);
    totals_.squares.add(static_cast<int64_t>(squares >> 32), 2 * UNIT + 32);
  }

  Totals totals_;
  Lane least_ = MAGNITUDE, most_ = static_cast<Lane>(~MAGNITUDE);  // keys
  int held_ = 0, left_ = 0;
  std::unique_ptr<Tables> tables_;  // rarely needed
  alignas(WIDTH) Element held_buffer_[MOST], left_buffer_[2 * MOST + GROUP];
};

// fp16 as the float32 that it widens to.
class WidenedCounter {
 public:
  using Element = uint16_t;

  void add(const uint16_t* x, int64_t n) {
    alignas(WIDTH) float wide[MOST_SWEPT];
    for (; n > 0; x += MOST_SWEPT, n -= MOST_SWEPT) {
      const int count = static_cast<int>(n < MOST_SWEPT ? n : MOST_SWEPT);
      stage_in<FP16>(x, 0, wide, count);
      floats_.add(wide, count);
    }
  }

  const Totals& totals() { return floats_.totals(); }

 private:
  SweptCounter<Fp32> floats_;
};

using CountBf16 = SweptCounter<Bf16>;
using CountFp16 = WidenedCounter;
using CountFp32 = SweptCounter<Fp32>;

#else

using CountBf16 = TableCounter<uint16_t, I16, 7, 127>;
using CountFp16 = TableCounter<uint16_t, I16, 10, 15>;
using CountFp32 = TableCounter<uint32_t, I32, 23, 127>;

#endif

}  // namespace
