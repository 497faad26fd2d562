// A whole tensor counted (`statistics.h`) and, if a format is given, what that does to it (`errors.h`), in one read:
// each tile is counted as it lies in memory, and quantised while it is in the cache. Every thread has counts of its
// own, added up in the end.
#pragma once

#include "errors.h"

namespace {

constexpr int MEASURED_COLUMNS = 512;  // of a tile of blocks across memory
constexpr int COUNTED_TILES = 4;       // of blocks along memory, that are counted at once
constexpr int64_t COUNTED = 1 << 16;   // elements of a tile that is only counted

template <class Counter> constexpr bool IS_BF16 = std::is_same_v<Counter, CountBf16>;

template <class Counter> struct Findings {
  Counter counter;
  DamageParts damage;
};

template <class Counter, class F> void gather(int64_t tiles, int threads, Totals& totals, Damage* damage, const F& f) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Findings<Counter> own;
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < tiles; tile++) f(tile, own);
#pragma omp critical
    {
      totals.add(own.counter.totals());
      if (damage) own.damage.onto(*damage);
    }
  }
}

template <class Counter> void count(const Call& call, Totals& totals) {
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int64_t n = call.outer * call.length * call.inner;
  gather<Counter>((n + COUNTED - 1) / COUNTED, call.threads, totals, nullptr,
                  [&](int64_t tile, Findings<Counter>& own) {
                    own.counter.add(x + tile * COUNTED, n - tile * COUNTED < COUNTED ? n - tile * COUNTED : COUNTED);
                  });
}

template <class Counter, class Tile>
void measure_along(const Call& call, const Rule& rule, const BlockFigures& figures, Totals& totals, Damage& damage) {
  const Tile quantise(rule);
  const auto* x = static_cast<const typename Counter::Element*>(call.x);
  const int64_t blocks = (call.length + rule.block - 1) / rule.block, per_tile = COUNTED_TILES * ROW_BLOCKS;
  const int64_t tiles = (blocks + per_tile - 1) / per_tile;
  gather<Counter>(call.outer * tiles, call.threads, totals, &damage, [&](int64_t tile, Findings<Counter>& own) {
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
  gather<Counter>(
      call.outer * blocks * strips, call.threads, totals, &damage, [&](int64_t tile, Findings<Counter>& own) {
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
