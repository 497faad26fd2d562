// What a tensor holds, counted exactly on any machine. For each sign and exponent: how many elements, the sum of their
// fractions m, and the sum of m^2. These are whole numbers, so sum and sum of squares follow without rounding, in any
// order.
//
// One addition an element does all three where the fraction is short: they are packed into 64 bits, [m^2 | m | 1], and
// unpacked before any of them can run over. Equal neighbours would wait for each other's addition, so neighbours go to
// different copies of the table.
#pragma once

#include "totals.h"

namespace {

constexpr int COPIES = 8;    // of the tables
constexpr int PADDING = 40;  // keeps their rows off equal places in a page, which the machine takes for one

// T: the bits of an element, V: a vector of such, FRACTION_BITS and BIAS_: how its dtype is made.
template <class T, class V, int FRACTION_BITS, int BIAS_> class TableCounter {
  using Lane = std::remove_reference_t<decltype(V{}[0])>;
  static constexpr int BITS = 8 * sizeof(T), BINS = 1 << (BITS - FRACTION_BITS), FIELDS = BINS / 2;
  static constexpr int COUNT = WIDTH / static_cast<int>(sizeof(T));
  static constexpr Lane ONE = static_cast<Lane>(1) << FRACTION_BITS;
  static constexpr Lane MAGNITUDE = static_cast<Lane>(~(static_cast<uint64_t>(1) << (BITS - 1)));
  static constexpr Lane INF = static_cast<Lane>(MAGNITUDE & ~(ONE - 1));
  static constexpr bool SHORT = BITS == 16;
  static constexpr int TALLY = SHORT ? (64 - 3 * FRACTION_BITS) / 3 : 17;  // bits of a count before it is unpacked
  static constexpr int64_t ROUND = static_cast<int64_t>(COPIES) * ((1 << TALLY) - 1);
  static constexpr int SWEEP = 4096;  // elements that stay in the first cache from one look to the next

 public:
  using Element = T;

  void add(const T* x, int64_t n) {
    while (n > 0) {
      const int count = static_cast<int>(n < SWEEP ? n : SWEEP);
      make_room(count);
      look(x, count);
      tally(x, count);
      x += count;
      n -= count;
    }
  }

  // Once, when all is added.
  const Totals& totals() {
    unpack();
    totals_.nan -= totals_.inf;  // they were counted together
    if (least_ <= most_) {
      totals_.min = value(least_);
      totals_.max = value(most_);
    }
    return totals_;
  }

 private:
  // The number whose bits, as a signed integer in the order of values, are `key`.
  static float value(Lane key) {
    const Lane bits = key ^ ((key >> (BITS - 1)) & MAGNITUDE);
    const int field = (bits & MAGNITUDE) >> FRACTION_BITS, fraction = bits & (ONE - 1);
    const double digits = field ? fraction + static_cast<double>(ONE) : fraction;
    const double magnitude = __builtin_ldexp(digits, (field ? field : 1) - BIAS_ - FRACTION_BITS);
    return static_cast<float>(bits < 0 ? -magnitude : magnitude);
  }

  // A copy of the tables gets an eighth of the elements, rounded up.
  void make_room(int count) {
    if (pending_ + count + COPIES > ROUND) unpack();
    pending_ += count + COPIES;
  }

  // Zeros, infinities and extremes; and subnormals, which need a closer look, if there are any.
  void look(const T* x, int n) {
    V zero{}, inf{}, subnormal{}, least = all(least_), most = all(most_);
    int i = 0;
    for (; i + COUNT <= n; i += COUNT) {
      const V v = load<V>(x + i), a = v & MAGNITUDE, key = v ^ ((v >> (BITS - 1)) & MAGNITUDE);
      zero -= a == V{};
      inf -= a == INF;
      subnormal |= (a < ONE) & (a != V{});
      least = smaller(least, a < INF ? key : all(MAGNITUDE));
      most = larger(most, a < INF ? key : all(static_cast<Lane>(~MAGNITUDE)));
    }
    for (int lane = 0; lane < COUNT; lane++) {
      totals_.zero += zero[lane];
      totals_.inf += inf[lane];
      least_ = least[lane] < least_ ? least[lane] : least_;
      most_ = most[lane] > most_ ? most[lane] : most_;
    }
    bool search = any(subnormal);
    for (; i < n; i++) {
      const Lane v = static_cast<Lane>(x[i]), a = v & MAGNITUDE, key = v ^ ((v >> (BITS - 1)) & MAGNITUDE);
      totals_.zero += a == 0;
      totals_.inf += a == INF;
      search |= a != 0 && a < ONE;
      if (a < INF && key < least_) least_ = key;
      if (a < INF && key > most_) most_ = key;
    }
    if (!search) return;
    for (int j = 0; j < n; j++) {
      const uint32_t a = static_cast<uint32_t>(x[j]) & static_cast<uint32_t>(MAGNITUDE);
      if (a && a < static_cast<uint32_t>(ONE)) totals_.count(31 - __builtin_clz(a) + 1 - BIAS_ - FRACTION_BITS, 1);
    }
  }

  void tally(const T* x, int n) {
    int i = 0;
    for (; i + COPIES <= n; i += COPIES)
      for (int copy = 0; copy < COPIES; copy++) tally_one(x[i + copy], copy);
    for (; i < n; i++) tally_one(x[i], i % COPIES);
  }

  QS_INLINE void tally_one(T x, int copy) {
    const uint64_t m = x & (ONE - 1);
    if constexpr (SHORT) {
      packed_[copy][x >> FRACTION_BITS] += PACKS.of[m];
    } else {
      packed_[copy][x >> FRACTION_BITS] += m << TALLY | 1;
      squares_[copy][x >> FRACTION_BITS] += m * m;
    }
  }

  void unpack() {
    for (int bin = 0; bin < BINS; bin++) {
      int64_t n = 0, fractions = 0;
      unsigned __int128 squares = 0;
      for (int copy = 0; copy < COPIES; copy++) {
        const uint64_t word = packed_[copy][bin];
        packed_[copy][bin] = 0;
        n += word & ((1 << TALLY) - 1);
        if constexpr (SHORT) {
          fractions += word >> TALLY & ((1ull << (TALLY + FRACTION_BITS)) - 1);
          squares += word >> (2 * TALLY + FRACTION_BITS);
        } else {
          fractions += word >> TALLY;
          squares += squares_[copy][bin];
          squares_[copy][bin] = 0;
        }
      }
      if (n) settle(bin, n, fractions, squares);
    }
    pending_ = 0;
  }

  // All elements of a sign and exponent: their digits are 2^F + m, or m if they are subnormal.
  void settle(int bin, int64_t n, int64_t fractions, unsigned __int128 squares) {
    const int field = bin % FIELDS, unit = (field ? field : 1) - BIAS_ - FRACTION_BITS;
    if (field == FIELDS - 1) {
      totals_.nan += n;
      return;
    }
    if (field) totals_.count(field - BIAS_, n);
    const int64_t sign = bin < FIELDS ? 1 : -1;
    totals_.sum.add(sign * fractions, unit);
    totals_.squares.add(static_cast<int64_t>(squares & 0xffffffff), 2 * unit);
    totals_.squares.add(static_cast<int64_t>(squares >> 32), 2 * unit + 32);
    if (!field) return;
    totals_.sum.add(sign * n, unit + FRACTION_BITS);
    totals_.squares.add(fractions, 2 * unit + FRACTION_BITS + 1);
    totals_.squares.add(n, 2 * (unit + FRACTION_BITS));
  }

  struct Packs {  // [m^2 | m | 1] of each short fraction
    uint64_t of[SHORT ? 1 << FRACTION_BITS : 1];
    constexpr Packs() : of{} {
      for (uint64_t m = 0; SHORT && m < (1ull << FRACTION_BITS); m++)
        of[m] = m * m << (2 * TALLY + FRACTION_BITS) | m << TALLY | 1;
    }
  };
  static constexpr Packs PACKS{};

  Totals totals_{};
  Lane least_ = MAGNITUDE, most_ = static_cast<Lane>(~MAGNITUDE);
  int64_t pending_ = 0;
  uint64_t packed_[COPIES][BINS + PADDING] = {}, squares_[COPIES][SHORT ? 1 : BINS + PADDING] = {};
};

}  // namespace
