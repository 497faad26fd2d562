"use strict";

/* How the error of the runs grows: forward from the first layer to the last, then backward down again.

   Forward stands at 0, 1, ... n-1, backward at n, n+1, ... with the last layer first. */

Report.growth = (() => {
  const { isNumber, short } = Report.numbers;
  const HEIGHT = 340;
  const FEW = 16; // layers up to which every one has its number on the axis

  function draw(node, choice) {
    const { metric } = choice;
    const layers = [...new Set(Report.data.comparison.columns.layer)]
      .filter((layer) => layer >= 0)
      .sort((a, b) => a - b);
    const placeOf = ({ operation, layer }) =>
      operation === "backward" ? 2 * layers.length - 1 - layers.indexOf(layer) : layers.indexOf(layer);
    const logarithmic = metric.id !== "sqnr_db";
    const rowsOf = (run) =>
      Report.compare
        .rowsOf(choice, run)
        .filter((row) => row.layer >= 0 && isNumber(row.value) && (!logarithmic || row.value > 0));
    const points = rowsOf(choice.run);
    const medians = choice.runs.map((run) => [run, mediansOf(rowsOf(run), placeOf)]);
    const values = [...points.map((row) => row.value), ...medians.flatMap(([, { y }]) => y)];
    return Report.plots.draw(node, (colors) => ({
      traces: [cloud(points, placeOf, choice.run), ...medians.map((median) => line(median, choice.run))],
      layout: { ...layoutOf(layers, colors), yaxis: valueAxis(metric, logarithmic ? values : null) },
    }));
  }

  function cloud(points, placeOf, run) {
    return {
      type: "scatter",
      mode: "markers",
      x: points.map(placeOf),
      y: points.map((row) => row.value),
      text: points.map(Report.compare.hover),
      hovertemplate: "%{text}<extra></extra>",
      marker: { size: 4, opacity: 0.35, color: Report.plots.runColor(run) },
      showlegend: false,
    };
  }

  function line([run, { x, y }], shown) {
    const name = short(Report.controls.runTitle(run));
    const dash = Report.data.runByType.get(run)?.dash ?? "solid";
    return {
      type: "scatter",
      mode: "lines",
      name,
      x,
      y,
      line: { color: Report.plots.runColor(run), width: run === shown ? 3 : 1.6, dash },
      hovertemplate: `%{y:.4g}<extra>${name}, median</extra>`,
    };
  }

  function layoutOf(layers, colors) {
    const count = layers.length;
    const every = count > FEW ? 4 : 1;
    const ticks = [...layers, ...[...layers].reverse()]
      .map((layer, place) => [place, layer])
      .filter(([, layer]) => layer % every === 0);
    const border = { type: "line", x0: count - 0.5, x1: count - 0.5, yref: "paper", y0: 0, y1: 1 };
    const word = { y: 1, yref: "paper", yanchor: "top", showarrow: false, font: { size: 11, color: colors.muted } };
    return {
      height: HEIGHT,
      margin: { l: 64, r: 16, t: 30, b: 46 },
      shapes: [{ ...border, line: { color: colors.muted, width: 1, dash: "dot" } }],
      annotations: [
        { ...word, x: count / 2 - 0.5, text: "forward →" },
        { ...word, x: 1.5 * count - 0.5, text: "backward →" },
      ],
      xaxis: {
        title: "layer",
        tickvals: ticks.map(([place]) => place),
        ticktext: ticks.map(([, layer]) => String(layer)),
        range: [-0.7, 2 * count - 0.3],
        showgrid: false,
        zeroline: false,
      },
    };
  }

  /* values: those of a logarithmic axis, null for a plain one. */
  function valueAxis({ title, unit }, values) {
    const axis = { title: `${title}${unit ? `, ${unit}` : ""}`, zeroline: false };
    if (!values?.length) return axis;
    const [low, high] = Report.scales.rangeOf(values.map(Math.log10));
    return { ...axis, ...Report.plots.decades(low - 0.2, high + 0.35) };
  }

  function mediansOf(rows, placeOf) {
    const groups = new Map();
    for (const row of rows) {
      const place = placeOf(row);
      if (!groups.has(place)) groups.set(place, []);
      groups.get(place).push(row.value);
    }
    const x = [...groups.keys()].sort((a, b) => a - b);
    const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
    return { x, y: x.map((place) => middle(groups.get(place))) };
  }

  return { draw };
})();
