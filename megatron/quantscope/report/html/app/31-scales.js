"use strict";

/* How a metric becomes a colour: log2 for magnitudes, log10 for percents, signed values centred, one range a metric. */

Report.scales = (() => {
  const { isNumber, power } = Report.numbers;
  const VIRIDIS = [
    [0, "#440154"],
    [0.13, "#482878"],
    [0.25, "#3e4989"],
    [0.38, "#31688e"],
    [0.5, "#26828e"],
    [0.63, "#1f9e89"],
    [0.75, "#35b779"],
    [0.88, "#6ece58"],
    [1, "#fde725"],
  ];
  const RED_BLUE = [
    [0, "#2166ac"],
    [0.17, "#4393c3"],
    [0.33, "#92c5de"],
    [0.46, "#d1e5f0"],
    [0.5, "#f7f7f7"],
    [0.54, "#fddbc7"],
    [0.67, "#f4a582"],
    [0.83, "#d6604d"],
    [1, "#b2182b"],
  ];
  const DECIBELS = [10, 40]; // formats of 4 to 8 bits lie within; 16-bit ones get a range of their own
  const AGREEMENT = [0, 60]; // dB between two runs: 60 is next to nothing, at 0 the error is as large as the signal
  const PERCENTS = [-3, 2]; // log10
  const WIDE = 64; // ratio of largest to smallest from which a plain scale would hide all but the largest

  const decades = (from, to) => Array.from({ length: to - from + 1 }, (_, step) => from + step);

  /* -> {forward, range: [low, high], ticks: {tickvals, ticktext}, colors}; forward gives null for what has no place. */
  const KINDS = {
    log2(values) {
      const logs = values.filter((value) => value > 0).map(Math.log2);
      const range = rangeOf(logs);
      return {
        forward: (value) => (value > 0 ? Math.log2(value) : null),
        range,
        ticks: Report.plots.powers(...range, 8),
      };
    },
    percent() {
      const ticktext = ["≤ 0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"];
      const forward = (value) => (value > 0 ? Math.max(PERCENTS[0], Math.log10(value)) : null);
      return { forward, range: PERCENTS, ticks: { tickvals: decades(...PERCENTS), ticktext } };
    },
    db(values, shown) {
      const sorted = shown.filter(isNumber).sort((a, b) => a - b);
      const narrow = !sorted.length || sorted[Math.floor(sorted.length / 10)] < DECIBELS[1] - 5;
      const range = narrow ? DECIBELS : rangeOf(sorted);
      const tickvals = steps(range, 5);
      const label = (tick) =>
        tick === range[0] && sorted[0] < tick
          ? `≤ ${tick}`
          : tick === range[1] && sorted.at(-1) > tick
            ? `≥ ${tick}`
            : String(tick);
      return { forward: (value) => value, range, ticks: { tickvals, ticktext: tickvals.map(label) } };
    },
    agreement(values) {
      const [low, high] = AGREEMENT;
      const tickvals = steps(AGREEMENT, 6);
      const beyond = (tick) =>
        tick === low && values.some((value) => value < low)
          ? "≤ "
          : tick === high && values.some((value) => value > high)
            ? "≥ "
            : "";
      return {
        forward: (value) => value,
        range: AGREEMENT,
        ticks: { tickvals, ticktext: tickvals.map((tick) => `${beyond(tick)}${tick}`) },
      };
    },
    log(values) {
      return logarithmic(values.filter((value) => value > 0));
    },
    binades(values) {
      const range = rangeOf(values);
      const tickvals = steps(range, 6);
      return { forward: (value) => value, range, ticks: { tickvals, ticktext: tickvals.map(String) } };
    },
    linear(values) {
      if (values.some((value) => value < 0)) return signed(values);
      const positive = values.filter((value) => value > 0).sort((a, b) => a - b);
      if (positive.length && positive.at(-1) > WIDE * positive[Math.floor(positive.length / 2)])
        return logarithmic(positive);
      return KINDS.binades(values);
    },
  };

  function logarithmic(positive) {
    const range = rangeOf(positive.map(Math.log10));
    const tickvals = decades(Math.ceil(range[0]), Math.floor(range[1]));
    if (tickvals.length < 2) return KINDS.binades.call(null, positive);
    const ticktext = tickvals.map((tick) => (tick >= 0 && tick < 4 ? String(10 ** tick) : power(tick, 10)));
    return { forward: (value) => (value > 0 ? Math.log10(value) : null), range, ticks: { tickvals, ticktext } };
  }

  /* asinh: straight through zero, logarithmic far from it. */
  function signed(values) {
    const sizes = values
      .map(Math.abs)
      .filter((size) => size > 0)
      .sort((a, b) => a - b);
    const unit = sizes[Math.floor(sizes.length / 2)] ?? 1;
    const top = Math.asinh((sizes.at(-1) ?? 1) / unit);
    const tickvals = [-top, -top / 2, 0, top / 2, top];
    const ticktext = tickvals.map((tick) => Report.numbers.magnitude(Number((unit * Math.sinh(tick)).toPrecision(2))));
    return {
      forward: (value) => Math.asinh(value / unit),
      range: [-top, top],
      ticks: { tickvals, ticktext },
      colors: RED_BLUE,
    };
  }

  function rangeOf(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  function steps([low, high], wanted) {
    const rough = (high - low) / wanted;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * size).find((candidate) => candidate >= rough);
    const count = Math.floor((high - Math.ceil(low / step) * step) / step + 1e-9);
    return Array.from({ length: count + 1 }, (_, index) =>
      Number(((Math.ceil(low / step) + index) * step).toPrecision(6)),
    );
  }

  /* All columns of a metric share one scale, so that formats, rules, runs and iterations can be compared by eye; the
     scale of what is shown alone tells its cells apart better. */
  function ofMetric(metric, shown, own = false) {
    if (own) return ownScale(metric.scale, shown);
    const { values } = Report.data.cells;
    const names = Object.keys(values).filter((name) => name === metric.id || name.startsWith(`${metric.id}/`));
    return of(
      metric.scale,
      names.flatMap((name) => values[name].filter(isNumber)),
      shown,
    );
  }

  function of(kind, values, shown = values) {
    return { colors: VIRIDIS, ...(KINDS[kind] ?? KINDS.linear)(values, shown) };
  }

  function ownScale(kind, shown) {
    const numbers = shown.filter(isNumber);
    if (kind === "percent") return ownPercents(numbers);
    const scale = of(kind, numbers);
    if (kind !== "db") return scale;
    const range = rangeOf(numbers);
    const tickvals = steps(range, 5);
    return { ...scale, range, ticks: { tickvals, ticktext: tickvals.map(String) } };
  }

  /* Zeros keep a category of their own only on a logarithmic scale; a plain one must reach them. */
  function ownPercents(numbers) {
    const positive = numbers.filter((value) => value > 0);
    if (!positive.length) return of("percent", numbers);
    const scale = { colors: VIRIDIS, ...logarithmic(positive) };
    return scale.forward(0) === null ? scale : of("binades", numbers);
  }

  /* For changes against the baseline, in binades, decibels or percent points. */
  function difference(values, unit) {
    const top = Math.max(1e-9, ...values.filter(isNumber).map(Math.abs));
    const tickvals = steps([-top, top], 6);
    const ticktext = tickvals.map((tick) => `${tick > 0 ? "+" : ""}${tick}`);
    return { forward: (value) => value, range: [-top, top], ticks: { tickvals, ticktext }, colors: RED_BLUE, unit };
  }

  const STOPS = VIRIDIS.map(([at, color]) => [
    at,
    [1, 3, 5].map((start) => Number.parseInt(color.slice(start, start + 2), 16)),
  ]);

  /* Share 0..1 -> [red, green, blue], for what is painted by hand. */
  function viridis(share) {
    const upper = Math.max(
      1,
      STOPS.findIndex(([at]) => at >= share),
    );
    const [[from, low], [to, high]] = [STOPS[upper - 1], STOPS[upper]];
    const part = (Math.min(1, Math.max(0, share)) - from) / (to - from);
    return low.map((value, index) => Math.round(value + part * (high[index] - value)));
  }

  return { ofMetric, of, viridis, difference, VIRIDIS, RED_BLUE, rangeOf, steps };
})();
