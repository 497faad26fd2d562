"use strict";

/* Figures of every head: the share of the first token, the entropy, the largest score; and that share in every layer. */

Report.sinks = (() => {
  const { one } = Report.dom;
  const { magnitude, percent, isNumber } = Report.numbers;
  const BARS = 200;
  const TICK = 32; // pixels from one layer's number to the next, at least

  function bars(root, entry) {
    const figures = [
      [
        "attention-sink",
        "first token, %",
        (entry.first_token ?? []).map((value) => 100 * value),
        (value) => percent(value),
      ],
      ["attention-entropy", "entropy, bit", entry.entropy_bits ?? [], (value) => `${value.toFixed(2)} bit`],
      ["attention-score", "largest score", entry.largest_score ?? [], magnitude],
    ];
    for (const [name, title, values, text] of figures) {
      Report.plots.draw(one(`[data-plot=${name}]`, root), () => ({
        traces: [
          {
            type: "bar",
            x: values.map((_, index) => index),
            y: values,
            text: values.map((value) => (isNumber(value) ? text(value) : "")),
            textposition: "none",
            marker: { color: Report.plots.runColor(entry.type) },
            hovertemplate: "head %{x}: %{text}<extra></extra>",
          },
        ],
        layout: {
          height: BARS,
          bargap: 0.35,
          margin: { l: 56, r: 8, t: 8, b: 40 },
          xaxis: {
            title: name === "attention-score" ? "head" : undefined,
            dtick: Math.ceil(values.length / 16),
            zeroline: false,
            showgrid: false,
          },
          yaxis: { title, rangemode: "tozero", nticks: 5 },
        },
      }));
    }
  }

  function layers(root, { type, layers: list, layer }) {
    const entries = list.map((number) => Report.data.attentionByPlace.get(Report.data.keyOf(type, number)));
    const most = Math.max(...entries.map((entry) => entry.heads));
    const z = Array.from({ length: most }, (_, head) =>
      entries.map((entry) => (isNumber(entry.first_token?.[head]) ? 100 * entry.first_token[head] : null)),
    );
    const node = one("[data-plot=attention-layers]", root);
    return Report.plots
      .draw(node, (colors) => ({
        traces: [shares(z, list, colors)],
        layout: layersLayout({ list, most, chosen: list.indexOf(layer), width: node.clientWidth }, colors),
      }))
      .then(() =>
        Report.plots.onClick(node, (point) => {
          const now = Report.attention.choiceOf(Report.router.state());
          Report.router.go(
            Report.router.hashOf("attention", [now.type, String(now.layers[point.x])], Report.router.state().params),
          );
        }),
      );
  }

  function shares(z, list, colors) {
    return {
      type: "heatmap",
      z,
      x: list.map((_, index) => index),
      colorscale: Report.scales.VIRIDIS,
      zmin: 0,
      zmax: 100,
      xgap: 1,
      ygap: 1,
      hovertemplate: "head %{y}, layer %{customdata}<br>first token %{z:.1f} %<extra></extra>",
      customdata: z.map(() => list),
      colorbar: Report.plots.colorbar(colors, "", { ticksuffix: " %" }),
    };
  }

  function layersLayout({ list, most, chosen, width }, colors) {
    const plain = { showgrid: false, zeroline: false, fixedrange: true };
    const every = Math.ceil((list.length * TICK) / width);
    const shown = list.map((_, index) => index).filter((index) => index % every === 0);
    const frame = { type: "rect", x0: chosen - 0.5, x1: chosen + 0.5, y0: -0.5, y1: most - 0.5 };
    return {
      height: 70 + 20 * most,
      margin: { l: 52, r: 8, t: 8, b: 46 },
      dragmode: false,
      plot_bgcolor: colors.missing,
      shapes: [
        { ...frame, line: { color: colors.sheet, width: 4 } },
        { ...frame, line: { color: colors.ink, width: 2 } },
      ],
      xaxis: {
        title: "layer",
        tickvals: shown,
        ticktext: shown.map((index) => String(list[index])),
        ...plain,
      },
      yaxis: { title: "head", autorange: "reversed", dtick: Math.ceil(most / 16), ...plain },
    };
  }

  return { bars, layers };
})();
