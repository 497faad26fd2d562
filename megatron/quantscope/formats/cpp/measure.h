// A whole tensor counted (`statistics.h`) and, if a format is given, what that does to it (`errors.h`), in one read:
// each tile is counted as it lies in memory, and quantised while it is in the cache. Every thread has counts of its
// own, added up in the end.
#pragma once

#include "errors.h"

namespace {

constexpr int MEASURED_COLUMNS = 512;  // of a tile of blocks across memory
constexpr int COUNTED_TILES = 4;       // of blocks along memory, that are counted at once
constexpr int64_t COUNTED = 1 << 16;   // elements of a tile that is only counted

constexpr int MAPPED = 32;         // elements of a block whose exponent is wanted
constexpr int MAPPED_TILE = 4096;  // elements that stay in the first cache while they are looked at twice

template <class Counter> constexpr bool IS_BF16 = std::is_same_v<Counter, CountBf16>;

template <class Counter> struct Findings {
  Counter counter;
  DamageParts damage;
};

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

template <class Counter, class F>
void gather_findings(int64_t tiles, int threads, Totals& totals, Damage& damage, const F& f) {
  gather<Findings<Counter>>(tiles, threads, f, [&](Findings<Counter>& own) {
    totals.add(own.counter.totals());
    own.damage.onto(damage);
  });
}

template <class Counter, class Tile>
void measure_along(const Call& call, const Rule& rule, const BlockFigures& figures, Totals& totals, Damage& damage) {
  const Tile quantise(rule);
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int64_t blocks = (call.length + rule.block - 1) / rule.block, per_tile = COUNTED_TILES * ROW_BLOCKS;
  const int64_t tiles = (blocks + per_tile - 1) / per_tile;
  gather_findings<Counter>(call.outer * tiles, call.threads, totals, damage, [&](int64_t tile, Findings<Counter>& own) {
    const int64_t row = tile / tiles * call.length, row_place = tile / tiles * blocks, begin = tile % tiles * per_tile;
    const int64_t end = begin + per_tile < blocks ? begin + per_tile : blocks, start = begin * rule.block;
    own.counter.add(x + row + start, (end * rule.block < call.length ? end * rule.block : call.length) - start);
    for (int64_t first = begin; first < end; first += ROW_BLOCKS) {
      const int count = static_cast<int>(end - first < ROW_BLOCKS ? end - first : ROW_BLOCKS);
      const int64_t offset = first * rule.block, left = call.length - offset;
      const int real = static_cast<int>(left < count * rule.block ? left : count * rule.block);
      if constexpr (IS_BF16<Counter> && Tile::GIVES_BF16) {
        const bool whole = real == count * rule.block && rule.block % Bf16::COUNT == 0;
        if (whole && !figures.amax && clean_damage<Bf16>(quantise, x + row + offset, count, own.damage)) continue;
      }
      alignas(64) float staged[ROW_BLOCKS * MOST_BLOCK];
      int64_t place[ROW_BLOCKS];
      int sizes[ROW_BLOCKS];
      STAGES[call.dtype].in(call.x, row + offset, staged, real);
      for (int i = real; i < count * rule.block; i++) staged[i] = 0;
      if (!figures.amax && clean_damage<Fp32>(quantise, staged, count, own.damage)) continue;
      for (int b = 0; b < count; b++) {
        place[b] = row_place + first + b;
        sizes[b] = real - b * rule.block < rule.block ? real - b * rule.block : rule.block;
      }
      damage_of(quantise, {staged, count, sizes, place}, figures, own.damage);
    }
  });
}

template <class Counter, class Tile>
void measure_across(const Call& call, const Rule& rule, const BlockFigures& figures, Totals& totals, Damage& damage) {
  const Tile quantise(rule);
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int64_t blocks = (call.length + rule.block - 1) / rule.block;
  const int64_t strips = (call.inner + MEASURED_COLUMNS - 1) / MEASURED_COLUMNS;
  gather_findings<Counter>(
      call.outer * blocks * strips, call.threads, totals, damage, [&](int64_t tile, Findings<Counter>& own) {
        const int64_t block = tile / strips % blocks, outer = tile / strips / blocks, first = block * rule.block;
        const int64_t begin = tile % strips * MEASURED_COLUMNS, left = call.inner - begin, below = call.length - first;
        const int width = static_cast<int>(left < MEASURED_COLUMNS ? left : MEASURED_COLUMNS);
        const int height = static_cast<int>(below < rule.block ? below : rule.block);
        const int64_t corner = (outer * call.length + first) * call.inner + begin;
        for (int r = 0; r < height; r++) own.counter.add(x + corner + r * call.inner, width);
        for (int c = 0; c < width; c += ROW_BLOCKS) {  // columns become blocks one after the other
          const int count = width - c < ROW_BLOCKS ? width - c : ROW_BLOCKS;
          alignas(64) float staged[ROW_BLOCKS * MOST_BLOCK] = {}, row[ROW_BLOCKS];
          int64_t place[ROW_BLOCKS];
          int sizes[ROW_BLOCKS];
          for (int r = 0; r < height; r++) {
            STAGES[call.dtype].in(call.x, corner + r * call.inner + c, row, count);
            for (int b = 0; b < count; b++) staged[b * rule.block + r] = row[b];
          }
          if (!figures.amax && clean_damage<Fp32>(quantise, staged, count, own.damage)) continue;
          for (int b = 0; b < count; b++) {
            place[b] = (outer * blocks + block) * call.inner + begin + c + b;
            sizes[b] = height;
          }
          damage_of(quantise, {staged, count, sizes, place}, figures, own.damage);
        }
      });
}

template <class Counter, class Tile>
void measure(const Call& call, const Rule& rule, const BlockFigures& figures, Totals& totals, Damage& damage) {
  if (call.inner == 1)
    measure_along<Counter, Tile>(call, rule, figures, totals, damage);
  else
    measure_across<Counter, Tile>(call, rule, figures, totals, damage);
}

template <class Counter>
void measure_by_rule(const Call& call, const Rule& rule, const BlockFigures& figures, Totals& totals, Damage& damage) {
  switch (rule.scale) {
    case E8M0_FLOOR:
    case E8M0_RCEIL:
      return measure<Counter, BlockedTile<PowerOfTwo>>(call, rule, figures, totals, damage);
    case E4M3_IN_TENSOR:
      return measure<Counter, BlockedTile<E4M3InTensor>>(call, rule, figures, totals, damage);
    default:
      if (rule.half_away) return measure<Counter, FlatTile<AwayElements>>(call, rule, figures, totals, damage);
      if (rule.emin == 1 - BIAS) return measure<Counter, FlatTile<ShortElements>>(call, rule, figures, totals, damage);
      return measure<Counter, FlatTile<EvenElements>>(call, rule, figures, totals, damage);
  }
}

}  // namespace
