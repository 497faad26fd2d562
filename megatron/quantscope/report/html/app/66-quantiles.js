"use strict";

/* Q-Q plot: quantiles in units of the middle half's spread against those of a normal distribution. Outliers make the
   rms, not that spread, so the line stays the line and heavy tails bend away from it. */

Report.quantiles = (() => {
  const { fill, one } = Report.dom;
  const { isNumber, magnitude } = Report.numbers;
  const QUARTILE = 0.674; // of a normal distribution
  const MOST = 4; // times the largest normal quantile: what lies beyond leaves the plot
  const HEIGHT = 300;

  function draw(root, choice) {
    const part = one("[data-part=quantiles]", root);
    const scores = Report.data.normal_scores;
    const runs = Report.data.axes.types
      .map((type) => ({ type, cell: Report.data.cellAt({ ...choice, type }) }))
      .map((run) => ({ ...run, values: Report.data.details?.quantiles?.[run.cell] }))
      .map((run) => ({ ...run, spread: run.values && scores ? spreadOf(run.values, scores) : 0 }))
      .filter(({ spread }) => spread > 0);
    part.hidden = !scores || !runs.some(({ type }) => type === choice.type);
    if (part.hidden) return;
    fill(
      one("[data-role=quantiles-note]", root),
      "Quantiles against those of a normal distribution whose middle half is as wide (the straight line). Where a curve leaves the line, the tails are heavier.",
    );
    Report.plots.draw(one("[data-plot=quantiles]", root), (colors) => ({
      traces: [line(scores, colors), ...runs.map((run) => curve(run, scores, choice.type))],
      layout: {
        height: HEIGHT,
        xaxis: { title: "normal quantile, standard deviations", zeroline: false },
        yaxis: { title: "quantile, standard deviations", zeroline: false, range: rangeOf(runs, scores) },
      },
    }));
  }

  function line(scores, colors) {
    const ends = [scores[0], scores.at(-1)];
    return {
      type: "scatter",
      mode: "lines",
      x: ends,
      y: ends,
      line: { color: colors.muted, dash: "dot", width: 1.5 },
      name: "normal",
      hoverinfo: "skip",
    };
  }

  function spreadOf(values, scores) {
    const nearest = (score) =>
      scores.reduce(
        (best, other, index) => (Math.abs(other - score) < Math.abs(scores[best] - score) ? index : best),
        0,
      );
    const [low, high] = [nearest(-QUARTILE), nearest(QUARTILE)];
    return (values[high] - values[low]) / (scores[high] - scores[low]);
  }

  function curve({ type, values, spread }, scores, shown) {
    return {
      type: "scatter",
      mode: "lines",
      name: Report.numbers.short(Report.controls.runTitle(type)),
      x: scores,
      y: values.map((value) => (isNumber(value) ? value / spread : null)),
      text: values.map(magnitude),
      hovertemplate: "%{x:.2f} standard deviations: %{text}",
      line: {
        color: Report.plots.runColor(type),
        width: type === shown ? 3 : 1.5,
        dash: Report.data.runByType.get(type)?.dash ?? "solid",
      },
    };
  }

  function rangeOf(runs, scores) {
    const all = runs.flatMap(({ values, spread }) => values.filter(isNumber).map((value) => value / spread));
    const [low, high] = Report.scales.rangeOf([...scores, ...all]);
    const most = MOST * scores.at(-1);
    return [Math.max(low, -most) * 1.08, Math.min(high, most) * 1.08];
  }

  return { draw };
})();
