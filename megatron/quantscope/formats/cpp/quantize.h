// Quantise and dequantise tiles of blocks, along memory (`rows`) or across it (`columns`).
//
// A tile is small enough to stay in the first cache while it is read twice: for the largest magnitude of each block,
// and for its elements. In between, the scales of all its blocks are computed a vector at a time.
//
// MX blocks have a short cut. Their scale is a power of two, so instead of bringing the elements to the element's grid
// and back, the grid is moved to the elements (`MovedGrid`): no products, and half of bf16's work is in 16-bit lanes.
// It holds while the moved grid and the rounding constant are normal floats; a tile where they are not goes the long
// way (`Scaled`), which always holds.
#pragma once

#include "elements.h"
#include "scales.h"

namespace {

constexpr int ROW_BLOCKS = 32;     // blocks of a tile of rows
constexpr int COLUMN_BYTES = 512;  // of one row of a tile of columns

template <class D> class MovedGrid {
  using Bits = typename D::Bits;
  using Lane = typename D::Lane;

 public:
  explicit MovedGrid(const Rule& rule)
      : allowed_(rule.beyond == rule.max && (rule.scale == E8M0_FLOOR || rule.scale == E8M0_RCEIL)),
        emin_(static_cast<Lane>(rule.emin)),
        emax_(static_cast<Lane>(rule.emax)),
        max_(D::lane(as<int32_t>(rule.max))),
        too_large_(D::lane((2 * BIAS - (FRACTION - rule.mantissa_bits)) << FRACTION)),
        raised_(D::lane((FRACTION - rule.mantissa_bits) << FRACTION)),
        full_(rule.scale == E8M0_RCEIL ? max_ & FRACTIONS : FRACTIONS) {}

  bool allowed() const { return allowed_; }

  // From the largest magnitudes of blocks: the smallest normal value of their grids, and its max. Both are nonsense for
  // the blocks that `fails` tells.
  QS_INLINE Bits lowest(Bits amax) const { return (field(amax) + emin_) << D::FRACTION_BITS; }
  QS_INLINE Bits max(Bits amax) const { return ((field(amax) - static_cast<Lane>(BIAS)) << D::FRACTION_BITS) + max_; }
  QS_INLINE Bits fails(Bits amax) const { return (field(amax) + emin_ < static_cast<Lane>(1)) | (amax >= too_large_); }

  template <bool STREAM>
  QS_INLINE void operator()(const typename D::T* x, typename D::T* y, Bits lowest, Bits max) const {
    const auto constant = [&](Bits a) { return larger(a & D::lane(EXPONENT), lowest) + raised_; };
    D::template round<STREAM>(x, y, constant, max);
  }

 private:
  static constexpr Lane FRACTIONS = (1 << D::FRACTION_BITS) - 1;

  // Of the scale. rceil: one more where the fraction of amax is larger than that of max.
  QS_INLINE Bits field(Bits amax) const { return (amax >> D::FRACTION_BITS) - emax_ - ((amax & FRACTIONS) > full_); }

  bool allowed_;
  Lane emin_, emax_, max_, too_large_, raised_, full_;
};

// The factors before and after rounding, in place of the amax (bits) of `vectors` vectors of blocks. `stored`, if any,
// gets the bytes of the scales; then the elements are wanted as they are, and the factor after is 1.
template <class Scaling>
QS_INLINE void factors(const Scaling& scaling, void* encode, void* decode, int vectors, uint8_t* stored) {
  for (int i = 0; i < vectors; i++) {
    F32 *before = static_cast<F32*>(encode) + i, *after = static_cast<F32*>(decode) + i;
    const BlockScale scale = scaling(load<I32>(before));
    put(before, scale.encode);
    put(after, stored ? all(1.0f) : scale.decode);
    if (stored)
      for (int lane = 0; lane < LANES; lane++) stored[i * LANES + lane] = static_cast<uint8_t>(scale.stored[lane]);
  }
}

// Round and bound scaled magnitudes.
class Scaled {
 public:
  explicit Scaled(const Rule& rule)
      : round_(rule.mantissa_bits, rule.emin, rule.emax), max_(all(rule.max)), beyond_(all(rule.beyond)) {}

  QS_INLINE F32 operator()(F32 a, F32 encode, F32 decode) const {
    const F32 rounded = round_(a * encode);
    return (rounded > max_ ? beyond_ : rounded) * decode;  // NaN stays
  }

 private:
  HalfEven round_;
  F32 max_, beyond_;
};

template <class D, class Scaling> struct Quantizer {
  explicit Quantizer(const Rule& rule) : scaling(rule), grid(rule), scaled(rule), block(rule.block) {}

  Scaling scaling;
  MovedGrid<D> grid;
  Scaled scaled;
  int block;
};

// The bits of the largest magnitude of each of `count` blocks, one after the other in memory; what is left of a tile is
// filled with the first of them.
template <class D>
QS_INLINE void largest_of_rows(const typename D::T* x, int count, int block, typename D::Lane* amax) {
  for (int b = 0; b < count; b++) {
    typename D::Bits a = D::magnitudes(x + b * block);
    for (int i = D::COUNT; i < block; i += D::COUNT) a = larger(a, D::magnitudes(x + b * block + i));
    amax[b] = largest_magnitude(a);
  }
  for (int b = count; b < ROW_BLOCKS; b++) amax[b] = amax[0];
}

// `count` <= ROW_BLOCKS blocks of known `amax`, which is not kept.
template <class D, bool EXACT, bool STREAM, class Scaling>
void rows(const Quantizer<D, Scaling>& q, const typename D::T* x, typename D::T* y, int count, typename D::Lane* amax,
          uint8_t* stored) {
  using Bits = typename D::Bits;
  alignas(64) typename D::Lane max[ROW_BLOCKS];
  Bits fails{};
  for (int b = 0; b < ROW_BLOCKS; b += D::COUNT) fails |= q.grid.fails(load<Bits>(amax + b));
  if (q.grid.allowed() && !stored && !any(fails)) {
    for (int b = 0; b < ROW_BLOCKS; b += D::COUNT) {
      const Bits a = load<Bits>(amax + b);
      put(amax + b, q.grid.lowest(a));
      put(max + b, q.grid.max(a));
    }
    for (int b = 0; b < count; b++)
      for (int i = b * q.block; i < (b + 1) * q.block; i += D::COUNT)
        q.grid.template operator()<STREAM>(x + i, y + i, all(amax[b]), all(max[b]));
    return;
  }

  alignas(64) int32_t encode[ROW_BLOCKS], decode[ROW_BLOCKS];
  for (int b = 0; b < ROW_BLOCKS; b++) encode[b] = D::widened(amax[b]);
  factors(q.scaling, encode, decode, ROW_BLOCKS / LANES, stored);
  for (int b = 0; b < count; b++) {
    const F32 before = all(as<float>(encode[b])), after = all(as<float>(decode[b]));
    const auto f = [&](F32 a, int) { return q.scaled(a, before, after); };
    for (int i = b * q.block; i < (b + 1) * q.block; i += D::COUNT) D::template map<EXACT, STREAM>(x + i, y + i, f);
  }
}

template <class D, bool EXACT, bool STREAM, class Scaling>
void rows(const Quantizer<D, Scaling>& q, const typename D::T* x, typename D::T* y, int count, uint8_t* stored) {
  alignas(64) typename D::Lane amax[ROW_BLOCKS];
  largest_of_rows<D>(x, count, q.block, amax);
  rows<D, EXACT, STREAM>(q, x, y, count, amax, stored);
}

// A block down each of `width` columns; from one of its rows to the next it is `stride` elements.
template <class D, bool EXACT, bool STREAM, class Scaling> void columns(const Quantizer<D, Scaling>& q,
                                                                        const typename D::T* x, typename D::T* y,
                                                                        long stride, int width, uint8_t* stored) {
  using Bits = typename D::Bits;
  constexpr int MOST = COLUMN_BYTES / WIDTH;
  const int vectors = width / D::COUNT;
  Bits amax[MOST] = {}, max[MOST], fails{};
  for (int row = 0; row < q.block; row++)
    for (int v = 0; v < vectors; v++) amax[v] = larger(amax[v], D::magnitudes(x + row * stride + v * D::COUNT));

  for (int v = 0; v < vectors; v++) fails |= q.grid.fails(amax[v]);
  if (q.grid.allowed() && !stored && !any(fails)) {
    for (int v = 0; v < vectors; v++) {
      const Bits a = amax[v];
      amax[v] = q.grid.lowest(a);
      max[v] = q.grid.max(a);
    }
    for (int row = 0; row < q.block; row++)
      for (int v = 0; v < vectors; v++) {
        const long place = row * stride + v * D::COUNT;
        __builtin_prefetch(x + place + width);  // the tile beside this one is the next
        q.grid.template operator()<STREAM>(x + place, y + place, amax[v], max[v]);
      }
    return;
  }

  F32 encode[MOST * D::FLOATS], decode[MOST * D::FLOATS];
  for (int i = 0; i < vectors * D::FLOATS; i++) encode[i] = D::part(amax[i / D::FLOATS], i % D::FLOATS);
  factors(q.scaling, encode, decode, vectors * D::FLOATS, stored);
  for (int row = 0; row < q.block; row++)
    for (int v = 0; v < vectors; v++) {
      const auto f = [&](F32 a, int which) {
        return q.scaled(a, encode[v * D::FLOATS + which], decode[v * D::FLOATS + which]);
      };
      const long place = row * stride + v * D::COUNT;
      D::template map<EXACT, STREAM>(x + place, y + place, f);
    }
}

}  // namespace
