// What a format asks of the kernels: the numbers of its record. `cpp_backend.Rule` in Python is the same structure.
#pragma once

#include "lanes.h"

namespace {

enum Scale : int32_t { UNSCALED, E8M0_FLOOR, E8M0_RCEIL, PER_TENSOR, E4M3_IN_TENSOR };

constexpr int BANDS = 4;

struct Rule {
  int32_t half_away;      // 0: ties to even; 1: ties away from zero
  int32_t mantissa_bits;  // of a tapered format: of its innermost band
  int32_t emin, emax;
  float max;
  float smallest;         // positive value
  float beyond;           // what a magnitude that rounds beyond max becomes: max, Inf or NaN
  int32_t negative_zero;  // whether -0 stays -0
  int32_t limit[BANDS];   // of a tapered format: largest |exponent| of each band ...
  int32_t drop[BANDS];    // ... and how many bits fewer the next one has
  int32_t scale;          // enum Scale
  int32_t block;          // elements that share a scale; 0: none do
  float encode, decode;   // PER_TENSOR, E4M3_IN_TENSOR: the tensor's scale and its reciprocal
  float block_max;        // E4M3_IN_TENSOR: of the element that block scales are stored in
  int32_t block_mantissa_bits, block_emin;
};

}  // namespace
