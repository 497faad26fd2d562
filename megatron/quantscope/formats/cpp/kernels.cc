// The C interface of the kernels, and all there is to compile: g++ -O3 -march=native -fopenmp -shared kernels.cc.
//
// Needs IEEE arithmetic as written: round to nearest, subnormals kept, no fused multiply-add (-ffp-contract=off).
#include "tensors.h"

extern "C" {

// The largest vector that was compiled in, in bytes: 64 AVX-512, 32 AVX2, 16 neither.
int qs_width() { return WIDTH; }

void qs_quantize(const Call* call, const Rule* rule) {
  switch (call->dtype) {
    case BF16: return by_element<Bf16>(*call, *rule);
    case FP32: return by_element<Fp32>(*call, *rule);
    default: return by_rule<Fp32, false, false>(*call, *rule);
  }
}

// Of a matrix [length, inner], blocks along its rows into call->y and down its columns into `down`. False, and nothing
// is done, where it takes two calls: short blocks, formats that are not MX, other dtypes than bf16 and float32.
bool qs_quantize_both(const Call* call, void* down, const Rule* rule) {
  switch (call->dtype) {
    case BF16: return both_by_element<Bf16>(*call, down, *rule);
    case FP32: return both_by_element<Fp32>(*call, down, *rule);
    default: return false;
  }
}

}  // extern "C"
