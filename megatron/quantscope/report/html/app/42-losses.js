"use strict";

/* Does the format train? Loss by iteration and its difference to the baseline in percent; bars where there is one. */

Report.losses = (() => {
  const { fill, plot, empty, h } = Report.dom;
  const { signedPercent, short } = Report.numbers;
  const HEIGHT = 270;
  const LABEL = 66; // pixels for the numbers beside the bars
  const MARGINS = { l: 80, r: 24, t: 12, b: 44 };
  const MARKED = 30; // iterations up to which points are marked

  function draw(root) {
    const runs = Object.entries(Report.data.losses?.runs ?? {}).filter(([, run]) => run.loss?.length);
    if (!runs.length) {
      fill(root, empty("The capture has no losses (they are written by training runs that log them)."));
      return;
    }
    if (!root.querySelector("[data-plot]"))
      fill(
        root,
        h(
          "div",
          { class: "pair-of-plots" },
          plot("loss", "Loss by run"),
          plot("loss-difference", "Difference of the loss to the baseline, percent"),
        ),
      );
    const single = runs.every(([, run]) => run.loss.length === 1);
    const [left, right] = root.querySelectorAll("[data-plot]");
    right.hidden = !others(runs).some(([, run]) => run.difference_percent.some(Number.isFinite));
    Report.plots.draw(left, (colors) =>
      single ? bars(runs, "loss", colors, left.clientWidth) : curves(runs, "loss", colors),
    );
    if (right.hidden) return;
    Report.plots.draw(right, (colors) =>
      single
        ? bars(others(runs), "difference_percent", colors, right.clientWidth)
        : curves(others(runs), "difference_percent", colors),
    );
  }

  const others = (runs) => runs.filter(([type]) => type !== Report.data.losses.baseline);
  const title = (type) => short(Report.controls.runTitle(type));
  const titleOf = (field) => (field === "loss" ? "loss" : `loss against ${title(Report.data.losses.baseline)}, %`);

  function curves(runs, field) {
    const traces = runs.map(([type, run]) => ({
      type: "scatter",
      mode: run.loss.length <= MARKED ? "lines+markers" : "lines",
      name: title(type),
      x: run.iterations,
      y: run[field],
      line: { color: Report.plots.runColor(type), width: 1.8, dash: Report.data.runByType.get(type)?.dash ?? "solid" },
      marker: { size: 5 },
      hovertemplate: `%{y:.5g}<extra>${title(type)}</extra>`,
    }));
    const signed = field !== "loss";
    return {
      traces,
      layout: {
        height: HEIGHT,
        hovermode: "x unified",
        xaxis: { title: "iteration" },
        yaxis: { title: titleOf(field), zeroline: signed, ticksuffix: signed ? " %" : "" },
        showlegend: !signed,
      },
    };
  }

  /* One iteration: bars from zero; what is too little to be seen there is in the difference. */
  function bars(runs, field, colors, width) {
    const values = runs.map(([, run]) => run[field][0]);
    const texts = values.map((value) => (field === "loss" ? value?.toFixed(4) : signedPercent(value)));
    const range = rangeFor(values, width);
    const trace = {
      type: "bar",
      orientation: "h",
      x: values,
      y: runs.map(([type]) => title(type)),
      text: texts,
      textposition: "outside",
      cliponaxis: false,
      textfont: { color: colors.ink },
      marker: { color: runs.map(([type]) => Report.plots.runColor(type)) },
      hovertemplate: "%{y}: %{text}<extra></extra>",
    };
    return {
      traces: [trace],
      layout: {
        height: 80 + 30 * Object.keys(Report.data.losses.runs).length,
        bargap: 0.4,
        xaxis: {
          title: `${titleOf(field)} (iteration ${runs[0]?.[1].iterations[0] ?? "–"})`,
          range,
          zeroline: true,
          nticks: 6,
          ticksuffix: field === "loss" ? "" : " %",
        },
        yaxis: { autorange: "reversed", showgrid: false },
        margin: MARGINS,
      },
    };
  }

  function rangeFor(values, width) {
    const [low, high] = Report.scales.rangeOf([0, ...values.filter(Number.isFinite)]);
    const share = Math.min(0.3, LABEL / (width - MARGINS.l - MARGINS.r));
    const sides = (low < 0) + (high > 0);
    const room = ((high - low || 1) * share) / (1 - sides * share);
    return [low < 0 ? low - room : 0, high > 0 ? high + room : 0];
  }

  return { draw };
})();
