// Elements of any dtype to float32 and back, for what the tiles do not take as it is: fp16 and float64, a short last
// block, columns that do not fill a vector, and the codes of elements.
//
// All conversions round to nearest, ties to even, but for float64 -> float32, which rounds to odd: it truncates, and
// sets the last bit if anything was lost. That keeps the one rounding to the element right (`torch_backend.py`).
#pragma once

#include "rounding.h"

namespace {

enum Dtype : int32_t { BF16, FP16, FP32, FP64 };

constexpr int HALF_FRACTION = 10, HALF_EMIN = -14, HALF_EMAX = 15;
constexpr int32_t HALF_NORMAL = 0x0400, HALF_EXPONENT = 0x7c00, HALF_NAN = 0x7e00;
constexpr int32_t REBASED = 112 << FRACTION;  // between the exponent fields of the two
constexpr float TO_HALF = 0x1p-112f, HALF_UNIT = 0x1p-24f;

inline int32_t widen(uint16_t bits, std::integral_constant<Dtype, BF16>) { return bits << 16; }

// Of fp16: one element, or a vector of them. Exact also where the machine flushes subnormals.
template <class I, class F> QS_INLINE I widened_half(I bits, F digits) {
  const I a = bits & 0x7fff, moved = (a << (FRACTION - HALF_FRACTION)) + REBASED;
  const I finite = a >= HALF_NORMAL ? moved : as<I>(digits * HALF_UNIT);
  return (a >= HALF_EXPONENT ? moved + REBASED : finite) | ((bits & 0x8000) << 16);
}

inline int32_t widen(uint16_t bits, std::integral_constant<Dtype, FP16>) {
  return widened_half<int32_t>(bits, static_cast<float>(bits & 0x7fff));
}

inline int32_t widen(float x, std::integral_constant<Dtype, FP32>) { return as<int32_t>(x); }

inline int32_t widen(double x, std::integral_constant<Dtype, FP64>) {
  const float nearest = static_cast<float>(x);
  int32_t bits = as<int32_t>(nearest);
  if (nearest != nearest || as<int64_t>(x) << 1 == as<int64_t>(static_cast<double>(__builtin_inf())) << 1) return bits;
  if (__builtin_fabs(nearest) > __builtin_fabs(x)) bits--;
  return bits | (as<float>(bits) != x);
}

inline void narrow(int32_t bits, uint16_t* to, std::integral_constant<Dtype, BF16>) {
  const int32_t a = bits & ~SIGN, rounded = (a + 0x7fff + ((a >> 16) & 1)) >> 16;
  *to = static_cast<uint16_t>((a > EXPONENT ? QUIET_NAN >> 16 : rounded) | ((bits >> 16) & 0x8000));
}

inline void narrow(int32_t bits, uint16_t* to, std::integral_constant<Dtype, FP16>) {
  const int32_t a = bits & ~SIGN;
  const int32_t lowest = (BIAS + HALF_EMIN) << FRACTION, highest = (BIAS + HALF_EMAX + 1) << FRACTION;
  int32_t e = a & EXPONENT;
  e = e < lowest ? lowest : e > highest ? highest : e;
  const float c = as<float>(e + ((FRACTION - HALF_FRACTION) << FRACTION));
  const float rounded = (as<float>(a) + c) - c;
  const int32_t finite = as<int32_t>(rounded * TO_HALF) >> (FRACTION - HALF_FRACTION);
  const int32_t r = a > EXPONENT ? HALF_NAN : finite > HALF_EXPONENT ? HALF_EXPONENT : finite;
  *to = static_cast<uint16_t>(r | ((bits >> 16) & 0x8000));
}

inline void narrow(int32_t bits, float* to, std::integral_constant<Dtype, FP32>) { *to = as<float>(bits); }
inline void narrow(int32_t bits, double* to, std::integral_constant<Dtype, FP64>) { *to = as<float>(bits); }

template <Dtype DTYPE> struct Stored {
  using T = uint16_t;
};
template <> struct Stored<FP32> {
  using T = float;
};
template <> struct Stored<FP64> {
  using T = double;
};

// `count` elements from `offset` on.
template <Dtype DTYPE> void stage_in(const void* from, long offset, float* to, int count) {
  const auto* x = static_cast<const typename Stored<DTYPE>::T*>(from) + offset;
  for (int i = 0; i < count; i++) to[i] = as<float>(widen(x[i], std::integral_constant<Dtype, DTYPE>{}));
}

template <> inline void stage_in<FP16>(const void* from, long offset, float* to, int count) {
  typedef uint16_t Halves __attribute__((vector_size(WIDTH / 2)));
  const auto* x = static_cast<const uint16_t*>(from) + offset;
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const I32 bits = __builtin_convertvector(load<Halves>(x + i), I32);
    put(to + i, widened_half(bits, __builtin_convertvector(bits & 0x7fff, F32)));
  }
  for (; i < count; i++) to[i] = as<float>(widen(x[i], std::integral_constant<Dtype, FP16>{}));
}

template <Dtype DTYPE> void stage_out(const float* from, void* to, long offset, int count) {
  auto* y = static_cast<typename Stored<DTYPE>::T*>(to) + offset;
  for (int i = 0; i < count; i++) narrow(as<int32_t>(from[i]), y + i, std::integral_constant<Dtype, DTYPE>{});
}

constexpr struct {
  void (*in)(const void*, long, float*, int);
  void (*out)(const float*, void*, long, int);
} STAGES[] = {
    {stage_in<BF16>, stage_out<BF16>},
    {stage_in<FP16>, stage_out<FP16>},
    {stage_in<FP32>, stage_out<FP32>},
    {stage_in<FP64>, stage_out<FP64>},
};

}  // namespace
