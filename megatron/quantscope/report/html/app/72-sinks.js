"use strict";

/* Figures of every head: the share of the first token, the entropy, the largest score; and that share in every layer. */

Report.sinks = (() => {
  const { one } = Report.dom;
  const { magnitude, percent, isNumber } = Report.numbers;
  const BARS = 200;

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
        traces: [
          {
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
          },
        ],
        layout: {
          height: 70 + 20 * most,
          margin: { l: 52, r: 8, t: 8, b: 46 },
          dragmode: false,
          plot_bgcolor: colors.missing,
          shapes: [
            {
              type: "rect",
              x0: list.indexOf(layer) - 0.5,
              x1: list.indexOf(layer) + 0.5,
              y0: -0.5,
              y1: most - 0.5,
              line: { color: colors.ink, width: 2 },
            },
          ],
          xaxis: {
            title: "layer",
            tickvals: list.map((_, index) => index),
            ticktext: list.map(String),
            showgrid: false,
            zeroline: false,
            fixedrange: true,
          },
          yaxis: {
            title: "head",
            autorange: "reversed",
            showgrid: false,
            zeroline: false,
            dtick: Math.ceil(most / 16),
            fixedrange: true,
          },
        },
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

  return { bars, layers };
})();
