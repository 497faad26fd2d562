// The scales of blocks from the bits of their largest magnitudes, a vector of blocks at a time, by the rules of
// `scales.py`.
#pragma once

#include "rounding.h"

namespace {

constexpr int E4M3_EMAX = 8;
constexpr float FLOAT_MAX = 0x1.fffffep127f;
constexpr int32_t HALF_SMALLEST_NORMAL = 1 << (FRACTION - 1);  // bits of 2^-127

struct BlockScale {
  F32 encode, decode;  // multiply with the one before rounding, with the other after
  I32 stored;          // the byte that stands for it
};

// E8M0: a power of two, whose stored byte is a float's exponent field.
class PowerOfTwo {
 public:
  static constexpr int NOT_A_NUMBER = 255;  // as stored

  explicit PowerOfTwo(const Rule& rule) : rceil_(rule.scale == E8M0_RCEIL), emax_(rule.emax), max_(all(rule.max)) {}

  QS_INLINE I32 field(I32 amax) const {
    if (!rceil_) return larger((amax >> FRACTION) - emax_, I32{});
    const I32 ratio = as<I32>(as<F32>(amax) / max_);
    // All fraction bits together carry into the exponent unless the fraction is 0: the ceiling of log2.
    const I32 up = (ratio + ((1 << FRACTION) - 1)) >> FRACTION;
    return ratio <= HALF_SMALLEST_NORMAL ? I32{} : up;
  }

  QS_INLINE BlockScale operator()(I32 amax) const {
    const I32 f = field(amax), shifted = f << FRACTION;
    const I32 power = f == I32{} ? all(HALF_SMALLEST_NORMAL) : shifted;
    const auto bad = amax >= EXPONENT;
    return {as<F32>((2 * BIAS << FRACTION) - shifted), as<F32>(bad ? all(QUIET_NAN) : power),
            bad ? all(NOT_A_NUMBER) : f};
  }

 private:
  bool rceil_;
  int emax_;
  F32 max_;
};

// NVFP4: an E4M3 under a float32 for the tensor, every operation in the order of TransformerEngine.
class E4M3InTensor {
 public:
  static constexpr int NOT_A_NUMBER = 127;  // as stored

  explicit E4M3InTensor(const Rule& rule)
      : round_(rule.block_mantissa_bits, rule.block_emin, E4M3_EMAX),
        element_max_(all(rule.max)),
        max_(all(rule.block_max)),
        encode_(all(rule.encode)),
        decode_(all(rule.decode)),
        mantissa_bits_(rule.block_mantissa_bits),
        emin_(rule.block_emin) {}

  QS_INLINE BlockScale operator()(I32 amax) const {
    F32 scale = round_(as<F32>(amax) / element_max_ * encode_);
    scale = scale > max_ ? max_ : scale;
    const F32 decode = scale * decode_, inverse = all(1.0f) / decode;
    const auto bad = amax >= EXPONENT;
    return {inverse > FLOAT_MAX ? all(FLOAT_MAX) : inverse, bad ? as<F32>(all(QUIET_NAN)) : decode,
            bad ? all(NOT_A_NUMBER) : code(scale)};
  }

 private:
  // In the field of an element, subnormals and normals are one count of steps.
  QS_INLINE I32 code(F32 scale) const {
    const int dropped = FRACTION - mantissa_bits_;
    const I32 normal = (as<I32>(scale) >> dropped) - ((BIAS + emin_ - 1) << mantissa_bits_);
    const I32 steps = __builtin_convertvector(scale * as<float>((BIAS - emin_ + mantissa_bits_) << FRACTION), I32);
    return as<I32>(scale) >= ((BIAS + emin_) << FRACTION) ? normal : steps;
  }

  HalfEven round_;
  F32 element_max_, max_, encode_, decode_;
  int mantissa_bits_, emin_;
};

}  // namespace
