// A whole tensor counted (`statistics.h`) and, if a format is given, what that does to it (`errors.h`), in one read:
// each tile is counted as it lies in memory, and quantised while it is in the cache. Every thread has counts of its
// own, added up in the end.
#pragma once

#include <optional>
#include <vector>

#include "errors.h"

namespace {

constexpr int MEASURED_COLUMNS = 512;  // of a tile of blocks across memory
constexpr int COUNTED_TILES = 4;       // of blocks along memory, that are counted at once
constexpr int64_t COUNTED = 1 << 16;   // elements of a tile that is only counted

constexpr int MAPPED = 32;         // elements of a block whose exponent is wanted
constexpr int MAPPED_TILE = 4096;  // elements that stay in the first cache while they are looked at twice

template <class Counter> constexpr bool IS_BF16 = std::is_same_v<Counter, CountBf16>;

// f(tile, own) for all tiles, where every thread has an `Own`; then merge(own) for each, one at a time.
template <class Own, class F, class Merge> void gather(int64_t tiles, int threads, const F& f, const Merge& merge) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Own own;
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < tiles; tile++) f(tile, own);
#pragma omp critical
    merge(own);
  }
}

template <class Counter> void count(const Call& call, Totals& totals) {
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int64_t n = call.outer * call.length * call.inner;
  const auto tile = [&](int64_t number, Counter& own) {
    const int64_t start = number * COUNTED;
    own.add(x + start, n - start < COUNTED ? n - start : COUNTED);
  };
  gather<Counter>((n + COUNTED - 1) / COUNTED, call.threads, tile, [&](Counter& own) { totals.add(own.totals()); });
}

// The exponent fields, as float32 has them, of the largest magnitudes of blocks one after the other.
template <Dtype DTYPE> void block_fields(const typename Stored<DTYPE>::T* x, int64_t blocks, uint8_t* to) {
  using D = std::conditional_t<DTYPE == FP32, Fp32, Bf16>;  // fp16 has its magnitudes in the same bits as bf16
  alignas(WIDTH) typename D::Lane amax[ROW_BLOCKS];
  for (int64_t first = 0; first < blocks; first += ROW_BLOCKS) {
    const int count = static_cast<int>(blocks - first < ROW_BLOCKS ? blocks - first : ROW_BLOCKS);
    largest_of_rows<D>(x + first * MAPPED, count, MAPPED, amax);
    for (int b = 0; b < count; b++) {
      const int32_t wide = DTYPE == FP16 ? widen(static_cast<uint16_t>(amax[b]), std::integral_constant<Dtype, FP16>{})
                                         : D::widened(amax[b]);
      to[first + b] = static_cast<uint8_t>(wide >> FRACTION);
    }
  }
}

// The same of blocks along the rows [outer, length], whose last may be short, and everything counted.
template <class Counter, Dtype DTYPE> void count_blocks(const Call& call, uint8_t* fields, Totals& totals) {
  using T = typename Stored<DTYPE>::T;
  const auto* x = static_cast<const T*>(call.x);
  const bool whole = call.length % MAPPED == 0;  // then all rows are one long row
  const int64_t outer = whole ? 1 : call.outer, length = whole ? call.outer * call.length : call.length;
  const int64_t blocks = (length + MAPPED - 1) / MAPPED, tiles = (length + MAPPED_TILE - 1) / MAPPED_TILE;
  const auto tile = [&](int64_t number, Counter& own) {
    const int64_t row = number / tiles, start = number % tiles * MAPPED_TILE, left = length - start;
    const int64_t count = left < MAPPED_TILE ? left : MAPPED_TILE, full = count / MAPPED;
    const T* from = x + row * length + start;
    uint8_t* to = fields + row * blocks + start / MAPPED;
    own.add(reinterpret_cast<const typename Counter::Element*>(from), count);
    block_fields<DTYPE>(from, full, to);
    if (full * MAPPED == count) return;
    T last[MAPPED] = {};
    std::memcpy(last, from + full * MAPPED, (count - full * MAPPED) * sizeof(T));
    block_fields<DTYPE>(last, 1, to + full);
  };
  gather<Counter>(outer * tiles, call.threads, tile, [&](Counter& own) { totals.add(own.totals()); });
}

// What to measure: `count` formats of one kind with blocks of one size, from one read.
struct Measured {
  const Call& call;
  const Rule* rules;
  int count;
  const BlockFigures& figures;  // of the only format
  Totals* totals;               // null if nobody wants the statistics of the tensor
  Damage* damages;

  int block() const { return rules[0].block; }
  int64_t blocks() const { return (call.length + block() - 1) / block(); }
};

template <class Counter> struct Findings {
  Counter counter;
  std::vector<DamageParts> damages;
};

template <class Counter, class F> void gather_findings(const Measured& m, int64_t tiles, const F& f) {
  const auto tile = [&](int64_t number, Findings<Counter>& own) {
    own.damages.resize(m.count);
    f(number, own);
  };
  gather<Findings<Counter>>(tiles, m.call.threads, tile, [&](Findings<Counter>& own) {
    if (m.totals) m.totals->add(own.counter.totals());
    for (size_t i = 0; i < own.damages.size(); i++) own.damages[i].onto(m.damages[i]);
  });
}

template <class Tile> std::vector<Tile> formats_of(const Measured& m) {
  std::vector<Tile> result;
  for (int i = 0; i < m.count; i++) result.emplace_back(m.rules[i]);
  return result;
}

// Every format's way with a tile: the quick one as bf16, if it is there as such, or as float32, which `fill` makes of
// it when that is wanted; else the thorough one.
template <class Tile, class Fill> void measure_tile(const Measured& m, const std::vector<Tile>& formats,
                                                    const LookedAt<Bf16>* narrow, const Fill& fill,
                                                    std::vector<DamageParts>& damages) {
  const bool quick = !m.figures.amax;
  MeasuredTile wide;
  std::optional<LookedAt<Fp32>> looked_at;
  for (int i = 0; i < m.count; i++) {
    if constexpr (Tile::GIVES_BF16)
      if (quick && narrow && clean_damage(formats[i], *narrow, damages[i])) continue;
    if (!looked_at) {
      fill(wide);
      looked_at.emplace(wide.x, wide.blocks, m.block());
    }
    if (quick && clean_damage(formats[i], *looked_at, damages[i])) continue;
    damage_of(formats[i], wide, m.figures, damages[i]);
  }
}

template <class Counter, class Tile> void measure_along(const Measured& m) {
  const Call& call = m.call;
  const auto formats = formats_of<Tile>(m);
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int block = m.block();
  const int64_t blocks = m.blocks(), per_tile = COUNTED_TILES * ROW_BLOCKS, tiles = (blocks + per_tile - 1) / per_tile;
  gather_findings<Counter>(m, call.outer * tiles, [&](int64_t tile, Findings<Counter>& own) {
    const int64_t row = tile / tiles * call.length, row_place = tile / tiles * blocks, begin = tile % tiles * per_tile;
    const int64_t end = begin + per_tile < blocks ? begin + per_tile : blocks, start = begin * block;
    if (m.totals) own.counter.add(x + row + start, (end * block < call.length ? end * block : call.length) - start);
    for (int64_t first = begin; first < end; first += ROW_BLOCKS) {
      const int count = static_cast<int>(end - first < ROW_BLOCKS ? end - first : ROW_BLOCKS);
      const int64_t offset = first * block, left = call.length - offset;
      const int real = static_cast<int>(left < count * block ? left : count * block);
      const auto fill = [&](MeasuredTile& to) {
        to.blocks = count;
        STAGES[call.dtype].in(call.x, row + offset, to.x, real);
        for (int i = real; i < count * block; i++) to.x[i] = 0;
        for (int b = 0; b < count; b++) {
          to.place[b] = row_place + first + b;
          to.size[b] = real - b * block < block ? real - b * block : block;
        }
      };
      std::optional<LookedAt<Bf16>> narrow;
      if constexpr (IS_BF16<Counter> && Tile::GIVES_BF16)
        if (real == count * block && block % Bf16::COUNT == 0) narrow.emplace(x + row + offset, count, block);
      measure_tile(m, formats, narrow ? &*narrow : nullptr, fill, own.damages);
    }
  });
}

template <class Counter, class Tile> void measure_across(const Measured& m) {
  const Call& call = m.call;
  const auto formats = formats_of<Tile>(m);
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int size = m.block();
  const int64_t blocks = m.blocks(), strips = (call.inner + MEASURED_COLUMNS - 1) / MEASURED_COLUMNS;
  gather_findings<Counter>(m, call.outer * blocks * strips, [&](int64_t tile, Findings<Counter>& own) {
    const int64_t block = tile / strips % blocks, outer = tile / strips / blocks, first = block * size;
    const int64_t begin = tile % strips * MEASURED_COLUMNS, left = call.inner - begin, below = call.length - first;
    const int width = static_cast<int>(left < MEASURED_COLUMNS ? left : MEASURED_COLUMNS);
    const int height = static_cast<int>(below < size ? below : size);
    const int64_t corner = (outer * call.length + first) * call.inner + begin;
    for (int r = 0; m.totals && r < height; r++) own.counter.add(x + corner + r * call.inner, width);
    for (int c = 0; c < width; c += ROW_BLOCKS) {  // columns become blocks one after the other
      const int count = width - c < ROW_BLOCKS ? width - c : ROW_BLOCKS;
      const auto fill = [&](MeasuredTile& to) {
        float row[ROW_BLOCKS];
        to.blocks = count;
        std::memset(to.x, 0, sizeof to.x);
        for (int r = 0; r < height; r++) {
          STAGES[call.dtype].in(call.x, corner + r * call.inner + c, row, count);
          for (int b = 0; b < count; b++) to.x[b * size + r] = row[b];
        }
        for (int b = 0; b < count; b++) {
          to.place[b] = (outer * blocks + block) * call.inner + begin + c + b;
          to.size[b] = height;
        }
      };
      alignas(64) uint16_t turned[ROW_BLOCKS * MOST_BLOCK];
      std::optional<LookedAt<Bf16>> narrow;
      if constexpr (IS_BF16<Counter> && Tile::GIVES_BF16)
        if (height == size && size % Bf16::COUNT == 0) {
          for (int r = 0; r < height; r++)
            for (int b = 0; b < count; b++) turned[b * size + r] = x[corner + r * call.inner + c + b];
          narrow.emplace(turned, count, size);
        }
      measure_tile(m, formats, narrow ? &*narrow : nullptr, fill, own.damages);
    }
  });
}

template <class Counter, class Tile> void measure(const Measured& m) {
  if (m.call.inner == 1)
    measure_along<Counter, Tile>(m);
  else
    measure_across<Counter, Tile>(m);
}

template <class Counter> void measure_by_rule(const Measured& m) {
  const Rule& rule = m.rules[0];
  switch (rule.scale) {
    case E8M0_FLOOR:
    case E8M0_RCEIL:
      return measure<Counter, BlockedTile<PowerOfTwo>>(m);
    case E4M3_IN_TENSOR:
      return measure<Counter, BlockedTile<E4M3InTensor>>(m);
    default:
      if (rule.half_away) return measure<Counter, FlatTile<AwayElements>>(m);
      if (rule.emin == 1 - BIAS) return measure<Counter, FlatTile<ShortElements>>(m);
      return measure<Counter, FlatTile<EvenElements>>(m);
  }
}

}  // namespace
