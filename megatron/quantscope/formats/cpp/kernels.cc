// The C interface of the kernels, and all there is to compile: g++ -O3 -march=native -fopenmp -shared kernels.cc.
//
// Needs IEEE arithmetic as written: round to nearest, subnormals kept, no fused multiply-add (-ffp-contract=off).
#include "blocks.h"
#include "measure.h"

extern "C" {

// The largest vector that was compiled in, in bytes: 64 AVX-512, 32 AVX2, 16 neither.
int qs_width() { return WIDTH; }

// The largest magnitude of BF16 or FP32, NaN if there is a NaN.
float qs_largest(const Call* call) {
  return as<float>(call->dtype == BF16 ? largest_of<Bf16>(*call) : largest_of<Fp32>(*call));
}

// Into call->y, or into call->codes and call->stored.
void qs_quantize(const Call* call, const Rule* rule) {
  switch (call->dtype) {
    case BF16:
      return by_element<Bf16>(*call, *rule);
    case FP32:
      return by_element<Fp32>(*call, *rule);
    default:
      return by_rule<Fp32, false, false>(*call, *rule);
  }
}

// Of a matrix [length, inner], blocks along its rows into call->y and down its columns into `down`. False, and nothing
// is done, where it takes two calls: short blocks, formats that are not MX, other dtypes than bf16 and float32.
bool qs_quantize_both(const Call* call, void* down, const Rule* rule) {
  switch (call->dtype) {
    case BF16:
      return both_by_element<Bf16>(*call, down, *rule);
    case FP32:
      return both_by_element<Fp32>(*call, down, *rule);
    default:
      return false;
  }
}

// Not for FP64.
void qs_count(const Call* call, Summary* summary) {
  Totals totals;
  switch (call->dtype) {
    case BF16:
      count<CountBf16>(*call, totals);
      break;
    case FP16:
      count<CountFp16>(*call, totals);
      break;
    default:
      count<CountFp32>(*call, totals);
  }
  summarise(totals, *summary);
}

// The same of rows [outer, length], and to `fields` [outer, blocks] the exponent field of the largest magnitude of every
// 32 elements of a row.
void qs_count_blocks(const Call* call, uint8_t* fields, Summary* summary) {
  Totals totals;
  switch (call->dtype) {
    case BF16:
      count_blocks<CountBf16, BF16>(*call, fields, totals);
      break;
    case FP16:
      count_blocks<CountFp16, FP16>(*call, fields, totals);
      break;
    default:
      count_blocks<CountFp32, FP32>(*call, fields, totals);
  }
  summarise(totals, *summary);
}

// Counts of the blocks of 32, and if `depths` of their elements by depth, into `counts`, which is zeros.
void qs_blocks(const Call* call, bool depths, BlockCounts* counts) {
  switch (call->dtype) {
    case BF16:
      return count_in_blocks<BF16>(*call, depths, *counts);
    case FP16:
      return count_in_blocks<FP16>(*call, depths, *counts);
    default:
      return count_in_blocks<FP32>(*call, depths, *counts);
  }
}

// What `count` formats do to the tensor, in blocks of rule->block also where they have none: formats of one kind and
// one size of blocks. `figures` are of the only format; `summary`, the statistics of the tensor, may be null.
void qs_measure(const Call* call, const Rule* rules, int count, const BlockFigures* figures, Summary* summary,
                Damage* damages) {
  Totals totals;
  const Measured measured{*call, rules, count, *figures, summary ? &totals : nullptr, damages};
  switch (call->dtype) {
    case BF16:
      measure_by_rule<CountBf16>(measured);
      break;
    case FP16:
      measure_by_rule<CountFp16>(measured);
      break;
    default:
      measure_by_rule<CountFp32>(measured);
  }
  if (summary) summarise(totals, *summary);
}

}  // extern "C"
