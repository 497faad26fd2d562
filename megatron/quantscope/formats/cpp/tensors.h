// A whole tensor cut into tiles, and each tile sent the fast way or through `staging.h`; tiles are what threads share.
#pragma once

#include "quantize.h"
#include "staging.h"

namespace {

constexpr int MOST_BLOCK = 64;  // elements of a block that staging has room for
constexpr int STAGED_COLUMNS = COLUMN_BYTES / sizeof(float);
constexpr int FLAT_TILE = 4096;  // elements

// The arguments of a call, as Python gives them: x as [outer, length, inner], blocks along length.
struct Call {
  const void* x;
  void* y;               // like x; null if codes are wanted
  uint8_t* codes;        // like x, or null
  uint8_t* stored;       // [outer, blocks, inner]: bytes of the scales that go with the codes, or null
  const uint8_t* table;  // [65536]: code by the bf16 bits of an element's value
  int64_t outer, length, inner;
  int32_t dtype, threads;
  int32_t stream;  // whether y is so large that it should bypass the cache
};

template <class F> void spread(int64_t tiles, int threads, const F& f) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < tiles; tile++) f(tile);
    fence();
  }
}

// A tile that has been staged and quantised, to where the call wants it.
inline void deliver(const Call& call, const float* from, int64_t offset, int count) {
  if (!call.codes) return STAGES[call.dtype].out(from, call.y, offset, count);
  for (int i = 0; i < count; i++)
    call.codes[offset + i] = call.table[static_cast<uint32_t>(as<int32_t>(from[i])) >> 16];
}

template <class Scaling>
void staged_rows(const Quantizer<Fp32, Scaling>& q, const Call& call, int64_t offset, int count, int64_t scale_offset) {
  alignas(64) float tile[ROW_BLOCKS * MOST_BLOCK];
  alignas(64) uint8_t stored[ROW_BLOCKS];
  const int blocks = (count + q.block - 1) / q.block;
  STAGES[call.dtype].in(call.x, offset, tile, count);
  for (int i = count; i < blocks * q.block; i++) tile[i] = 0;
  rows<Fp32, true, false>(q, tile, tile, blocks, call.codes ? stored : nullptr);
  deliver(call, tile, offset, count);
  if (!call.codes) return;
  for (int b = 0; b < blocks; b++) {
    call.stored[scale_offset + b] = stored[b];
    const int end = (b + 1) * q.block < count ? (b + 1) * q.block : count;
    if (stored[b] == q.scaling.NOT_A_NUMBER) std::memset(call.codes + offset + b * q.block, 0, end - b * q.block);
  }
}

template <class Scaling> void staged_columns(const Quantizer<Fp32, Scaling>& q, const Call& call, int64_t offset,
                                             int height, int width, int64_t scale_offset) {
  alignas(64) float tile[MOST_BLOCK * STAGED_COLUMNS];
  alignas(64) uint8_t stored[STAGED_COLUMNS];
  std::memset(tile, 0, sizeof(float) * q.block * STAGED_COLUMNS);
  for (int r = 0; r < height; r++)
    STAGES[call.dtype].in(call.x, offset + r * call.inner, tile + r * STAGED_COLUMNS, width);
  const int padded = (width + LANES - 1) / LANES * LANES;
  columns<Fp32, true, false>(q, tile, tile, STAGED_COLUMNS, padded, call.codes ? stored : nullptr);
  for (int r = 0; r < height; r++) {
    const int64_t row = offset + r * call.inner;
    deliver(call, tile + r * STAGED_COLUMNS, row, width);
    for (int c = 0; call.codes && c < width; c++)
      if (stored[c] == q.scaling.NOT_A_NUMBER) call.codes[row + c] = 0;
  }
  if (call.codes) std::memcpy(call.stored + scale_offset, stored, width);
}

// The bits of the largest magnitude of n elements, as those of a float32; of a NaN, if there is one.
template <class D> int32_t largest_of(const Call& call) {
  const auto* x = static_cast<const typename D::T*>(call.x);
  const int64_t n = call.outer * call.length * call.inner, tiles = (n + FLAT_TILE - 1) / FLAT_TILE;
  int32_t result = 0;
#pragma omp parallel for schedule(static) reduction(max : result) num_threads(call.threads) if (call.threads > 1)
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t end = (tile + 1) * FLAT_TILE < n ? (tile + 1) * FLAT_TILE : n;
    int64_t i = tile * FLAT_TILE;
    typename D::Bits most{};
    for (; i + D::COUNT <= end; i += D::COUNT) most = larger(most, D::magnitudes(x + i));
    int32_t own = D::widened(largest_magnitude(most));
    for (; i < end; i++) {
      float element;
      STAGES[call.dtype].in(x, i, &element, 1);
      own = own > (as<int32_t>(element) & ~SIGN) ? own : as<int32_t>(element) & ~SIGN;
    }
    result = result > own ? result : own;
  }
  return result;
}

// Blocks along memory.
template <class D, bool FAST, bool EXACT, bool STREAM, class Scaling> void along(const Call& call, const Rule& rule) {
  const Quantizer<D, Scaling> q(rule);
  const Quantizer<Fp32, Scaling> wide(rule);
  const bool whole = call.length % rule.block == 0;  // then all rows are one long row
  const int64_t outer = whole ? 1 : call.outer, length = whole ? call.outer * call.length : call.length;
  const int64_t blocks = (length + rule.block - 1) / rule.block, tiles = (blocks + ROW_BLOCKS - 1) / ROW_BLOCKS;
  spread(outer * tiles, call.threads, [&](int64_t tile) {
    const int64_t first = tile % tiles * ROW_BLOCKS, start = tile / tiles * length, left = length - first * rule.block;
    int count = static_cast<int>(left < ROW_BLOCKS * rule.block ? left : ROW_BLOCKS * rule.block);
    int64_t offset = start + first * rule.block, scale_offset = tile / tiles * blocks + first;
    if constexpr (FAST) {
      const int full = count / rule.block;
      using T = typename D::T;
      if (full)
        rows<D, EXACT, STREAM>(q, static_cast<const T*>(call.x) + offset, static_cast<T*>(call.y) + offset, full,
                               nullptr);
      offset += full * rule.block;
      scale_offset += full;
      count -= full * rule.block;
    }
    if (count) staged_rows(wide, call, offset, count, scale_offset);
  });
}

// Blocks across memory.
template <class D, bool FAST, bool EXACT, bool STREAM, class Scaling> void across(const Call& call, const Rule& rule) {
  const Quantizer<D, Scaling> q(rule);
  const Quantizer<Fp32, Scaling> wide(rule);
  constexpr int MOST = COLUMN_BYTES / sizeof(typename D::T);
  const int64_t blocks = (call.length + rule.block - 1) / rule.block, strips = (call.inner + MOST - 1) / MOST;
  spread(call.outer * blocks * strips, call.threads, [&](int64_t tile) {
    const int64_t block = tile / strips % blocks, outer = tile / strips / blocks, first = block * rule.block;
    const int64_t left = call.length - first;
    const int height = static_cast<int>(left < rule.block ? left : rule.block);
    int64_t column = tile % strips * MOST;
    int width = static_cast<int>(call.inner - column < MOST ? call.inner - column : MOST);
    const int64_t row = (outer * call.length + first) * call.inner, scale_row = (outer * blocks + block) * call.inner;
    if (FAST && height == rule.block) {
      const int full = width / D::COUNT * D::COUNT;
      using T = typename D::T;
      if (full)
        columns<D, EXACT, STREAM>(q, static_cast<const T*>(call.x) + row + column,
                                  static_cast<T*>(call.y) + row + column, call.inner, full, nullptr);
      column += full;
      width -= full;
    }
    for (; width > 0; column += STAGED_COLUMNS, width -= STAGED_COLUMNS)
      staged_columns(wide, call, row + column, height, width < STAGED_COLUMNS ? width : STAGED_COLUMNS,
                     scale_row + column);
  });
}

template <class D, bool FAST, bool STREAM, class Scaling> void blocked(const Call& call, const Rule& rule) {
  constexpr bool EXACT = std::is_same_v<Scaling, PowerOfTwo>;  // a bf16 times powers of two, with fewer digits
  if (call.inner == 1)
    along<D, FAST, EXACT, STREAM, Scaling>(call, rule);
  else
    across<D, FAST, EXACT, STREAM, Scaling>(call, rule);
}

// Both for a matrix whose sides are whole blocks: a tile comes from memory once. call.y gets the blocks along memory.
template <class D, bool STREAM, class Scaling> void both(const Call& call, void* down, const Rule& rule) {
  constexpr bool EXACT = std::is_same_v<Scaling, PowerOfTwo>;
  using T = typename D::T;
  constexpr int MOST = COLUMN_BYTES / sizeof(T);
  const Quantizer<D, Scaling> q(rule);
  const int64_t strips = (call.inner + MOST - 1) / MOST;
  spread(call.length / rule.block * strips, call.threads, [&](int64_t tile) {
    const int64_t column = tile % strips * MOST, corner = tile / strips * rule.block * call.inner + column;
    const int width = static_cast<int>(call.inner - column < MOST ? call.inner - column : MOST);
    const T* x = static_cast<const T*>(call.x) + corner;
    columns<D, EXACT, STREAM>(q, x, static_cast<T*>(down) + corner, call.inner, width, nullptr);
    for (int r = 0; r < rule.block; r++)
      rows<D, EXACT, STREAM>(q, x + r * call.inner, static_cast<T*>(call.y) + corner + r * call.inner,
                             width / rule.block, nullptr);
  });
}

// Elements without blocks.
template <class D, bool STREAM, class F>
void flat_tile(const typename D::T* x, typename D::T* y, int count, const F& f) {
  for (int i = 0; i < count; i += D::COUNT) f.template operator()<D, STREAM>(x + i, y + i);
}

struct EvenElements {
  explicit EvenElements(const Rule& rule, bool codes)
      : scaled_(rule), encode_(all(rule.encode)), decode_(all(codes ? 1.0f : rule.decode)) {}
  template <class D, bool STREAM> QS_INLINE void operator()(const typename D::T* x, typename D::T* y) const {
    D::template map<false, STREAM>(x, y, [&](F32 a, int) { return scaled_(a, encode_, decode_); });
  }

 private:
  Scaled scaled_;
  F32 encode_, decode_;
};

// Of a format with the exponents of float32 itself: its values end at one bit everywhere, subnormals too, and the
// constant that `EvenElements` adds would overflow.
struct ShortElements {
  explicit ShortElements(const Rule& rule, bool)
      : dropped_(FRACTION - rule.mantissa_bits), max_(all(rule.max)), beyond_(all(rule.beyond)) {}
  template <class D, bool STREAM> QS_INLINE void operator()(const typename D::T* x, typename D::T* y) const {
    D::template map<false, STREAM>(x, y, [&](F32 a, int) {
      const I32 bits = as<I32>(a), odd = (bits >> dropped_) & 1;
      const F32 r = as<F32>((bits + ((1 << (dropped_ - 1)) - 1) + odd) & -(1 << dropped_));
      const F32 bounded = r > max_ ? beyond_ : r;
      return bits > EXPONENT ? a : bounded;  // NaN
    });
  }

 private:
  int dropped_;
  F32 max_, beyond_;
};

struct AwayElements {
  explicit AwayElements(const Rule& rule, bool) : bits16_(rule), bits32_(rule) {}
  template <class D, bool STREAM> QS_INLINE void operator()(const typename D::T* x, typename D::T* y) const {
    using Bits = typename D::Bits;
    if constexpr (sizeof(typename D::T) == 2)
      store<STREAM>(y, bits16_(load<Bits>(x)));
    else
      store<STREAM>(y, bits32_(load<Bits>(x)));
  }

 private:
  HalfAway<I16> bits16_;
  HalfAway<I32> bits32_;
};

template <class D, bool FAST, bool STREAM, class Elements> void flat(const Call& call, const Rule& rule) {
  const Elements elements(rule, call.codes);
  const int64_t n = call.outer * call.length * call.inner;
  spread((n + FLAT_TILE - 1) / FLAT_TILE, call.threads, [&](int64_t tile) {
    int64_t offset = tile * FLAT_TILE;
    int count = static_cast<int>(n - offset < FLAT_TILE ? n - offset : FLAT_TILE);
    if constexpr (FAST) {
      const int full = count / D::COUNT * D::COUNT;
      using T = typename D::T;
      flat_tile<D, STREAM>(static_cast<const T*>(call.x) + offset, static_cast<T*>(call.y) + offset, full, elements);
      offset += full;
      count -= full;
    }
    if (!count) return;
    alignas(64) float staged[FLAT_TILE] = {};
    STAGES[call.dtype].in(call.x, offset, staged, count);
    flat_tile<Fp32, false>(staged, staged, (count + LANES - 1) / LANES * LANES, elements);
    deliver(call, staged, offset, count);
  });
}

template <class D, bool FAST, bool STREAM> void by_rule(const Call& call, const Rule& rule) {
  switch (rule.scale) {
    case E8M0_FLOOR:
    case E8M0_RCEIL:
      return blocked<D, FAST, STREAM, PowerOfTwo>(call, rule);
    case E4M3_IN_TENSOR:
      return blocked<D, FAST, STREAM, E4M3InTensor>(call, rule);
    default:
      if (rule.half_away) return flat<D, FAST, STREAM, AwayElements>(call, rule);
      if (rule.emin == 1 - BIAS) return flat<D, FAST, STREAM, ShortElements>(call, rule);
      return flat<D, FAST, STREAM, EvenElements>(call, rule);
  }
}

template <class D> bool can_stream(const Call& call, const Rule& rule, const void* to) {
  const bool whole_blocks = !rule.block || call.length % rule.block == 0;
  const bool whole_rows = call.inner == 1 ? whole_blocks : call.inner * sizeof(typename D::T) % WIDTH == 0;
  return call.stream && whole_rows && reinterpret_cast<uintptr_t>(to) % WIDTH == 0;
}

template <class D> void by_element(const Call& call, const Rule& rule) {
  if (call.codes || rule.block % D::COUNT)
    by_rule<D, false, false>(call, rule);
  else if (can_stream<D>(call, rule, call.y))
    by_rule<D, true, true>(call, rule);
  else
    by_rule<D, true, false>(call, rule);
}

template <class D> bool both_by_element(const Call& call, void* down, const Rule& rule) {
  const bool is_mx = rule.scale == E8M0_FLOOR || rule.scale == E8M0_RCEIL;
  const int strip = COLUMN_BYTES / sizeof(typename D::T);
  if (!is_mx || rule.block % D::COUNT || strip % rule.block) return false;
  if (call.length % rule.block || call.inner % rule.block) return false;
  if (can_stream<D>(call, rule, call.y) && can_stream<D>(call, rule, down))
    both<D, true, PowerOfTwo>(call, down, rule);
  else
    both<D, false, PowerOfTwo>(call, down, rule);
  return true;
}

}  // namespace
