// How bf16 and float32 lie in memory, and how a vector of them goes through a function of magnitudes.
//
// COUNT elements fill a vector. `Bits` are their bits in lanes of their own size; as floats they fill FLOATS vectors,
// which `map` and `part` tell apart by `which`.
#pragma once

#include "lanes.h"

namespace {

struct Bf16 {
  using T = uint16_t;
  using Bits = I16;
  using Unsigned = U16;
  using Lane = int16_t;
  static constexpr int FLOATS = 2, COUNT = HALF_LANES, FRACTION_BITS = FRACTION - 16;

  static constexpr QS_INLINE Lane lane(int32_t float_bits) { return static_cast<Lane>(float_bits >> 16); }
  static QS_INLINE int32_t widened(Lane bits) { return bits << 16; }
  static QS_INLINE Bits magnitudes(const T* x) { return load<Bits>(x) & lane(~SIGN); }
  static QS_INLINE F32 part(Bits bits, int which) {
    return as<F32>(which ? as<I32>(bits) & UPPER : as<I32>(bits) << 16);
  }
  static QS_INLINE Bits join(I32 even, I32 odd) { return as<Bits>(((even >> 16) & ~UPPER) | (odd & UPPER)); }

  // The signs of x on f(magnitudes). EXACT: every result is a bf16 already; otherwise it is rounded to even.
  template <bool EXACT, bool STREAM, class F> static QS_INLINE void map(const T* x, T* y, const F& f) {
    const Bits v = load<Bits>(x), a = v & lane(~SIGN);
    const Bits r = join(narrow<EXACT>(as<I32>(f(part(a, 0), 0))), narrow<EXACT>(as<I32>(f(part(a, 1), 1))));
    store<STREAM>(y, r | (v & lane(SIGN)));
  }

  // The same where f is (float + c) - c with constants `c`, at most `max`: all but the sums is done in 16-bit lanes.
  template <bool STREAM, class C> static QS_INLINE void round(const T* x, T* y, const C& constant, Bits max) {
    const Bits v = load<Bits>(x), a = v & lane(~SIGN), c = constant(a);
    const F32 even = (part(a, 0) + part(c, 0)) - part(c, 0), odd = (part(a, 1) + part(c, 1)) - part(c, 1);
    store<STREAM>(y, smaller(join(as<I32>(even), as<I32>(odd)), max) | (v & lane(SIGN)));
  }

 private:
  template <bool EXACT> static QS_INLINE I32 narrow(I32 a) {
    if constexpr (EXACT) return a;
    const I32 rounded = a + 0x7fff + ((a >> 16) & 1);
    return a > EXPONENT ? all(QUIET_NAN) : rounded;
  }
};

struct Fp32 {
  using T = float;
  using Bits = I32;
  using Unsigned = U32;
  using Lane = int32_t;
  static constexpr int FLOATS = 1, COUNT = LANES, FRACTION_BITS = FRACTION;

  static constexpr QS_INLINE Lane lane(int32_t float_bits) { return float_bits; }
  static QS_INLINE int32_t widened(Lane bits) { return bits; }
  static QS_INLINE Bits magnitudes(const T* x) { return load<Bits>(x) & ~SIGN; }
  static QS_INLINE F32 part(Bits bits, int) { return as<F32>(bits); }

  template <bool EXACT, bool STREAM, class F> static QS_INLINE void map(const T* x, T* y, const F& f) {
    const Bits v = load<Bits>(x);
    store<STREAM>(y, as<I32>(f(as<F32>(v & ~SIGN), 0)) | (v & SIGN));
  }

  template <bool STREAM, class C> static QS_INLINE void round(const T* x, T* y, const C& constant, Bits max) {
    const Bits v = load<Bits>(x), a = v & ~SIGN, c = constant(a);
    const F32 rounded = (as<F32>(a) + as<F32>(c)) - as<F32>(c);
    store<STREAM>(y, smaller(as<I32>(rounded), max) | (v & SIGN));
  }
};

}  // namespace
