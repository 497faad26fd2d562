"use strict";

/* A heatmap of sites down and layers across. Cells without a colour of their own (exact, lost, zero) have categories. */

Report.grid = (() => {
  const { h, fill } = Report.dom;
  const { plain, short, layer: layerText } = Report.numbers;
  const ROW = 19;
  const COMPACT_ROW = 12;
  const HEAD = 14;
  const FOOT = 48;
  const CATEGORIES = [
    { name: "zero", color: "faint", text: "zero" },
    { name: "exact", color: "exact", text: "exact: no element differs" },
    { name: "lost", color: "alarm", text: "lost: values became Inf or NaN" },
  ];

  function categoryOf(value, scale) {
    if (value === "exact" || value === "lost") return value;
    return value === 0 && scale.forward(0) === null ? "zero" : null;
  }

  /* view: {rows: sites, columns: layers, valueAt(site, layer), textAt(site, layer), scale, title, compact, selected,
     marked: {site, layer, text}, height}. valueAt gives a number, "exact", "lost" or null. */
  function draw(node, view) {
    const { rows, columns, scale } = view;
    const values = rows.map((site) => columns.map((layer) => view.valueAt(site, layer)));
    const colored = values.map((row) => row.map((value) => (typeof value === "number" ? scale.forward(value) : null)));
    const categories = values.map((row) => row.map((value) => codeOf(categoryOf(value, scale))));
    const texts = rows.map((site) => columns.map((layer) => view.textAt(site, layer)));
    const height = view.height ?? heightOf(rows.length, view.compact);
    return Report.plots.draw(node, (colors) => ({
      traces: [
        categoryTrace(categories, texts, columns, colors, view),
        colorTrace(colored, texts, columns, colors, view),
      ],
      layout: {
        height,
        margin: { l: 62, r: 8, t: HEAD, b: FOOT },
        xaxis: layerAxis(columns),
        yaxis: siteAxis(rows, view),
        plot_bgcolor: colors.missing,
        shapes: [
          ...moduleLines(rows, columns, colors),
          ...ring(view.selected, view, colors),
          ...ring(view.marked, view, colors),
        ],
        annotations: view.marked ? [callout(view, colors)] : [],
        hoverdistance: 1,
        dragmode: false,
      },
    }));
  }

  const heightOf = (rows, compact) => rows * (compact ? COMPACT_ROW : ROW) + HEAD + FOOT;
  const codeOf = (name) => (name ? CATEGORIES.findIndex((category) => category.name === name) : null);

  function colorTrace(z, text, columns, colors, { scale, title, compact }) {
    return {
      type: "heatmap",
      z,
      text,
      x: columns.map((_, index) => index),
      colorscale: scale.colors,
      zmin: scale.range[0],
      zmax: scale.range[1],
      xgap: compact ? 0.5 : 1,
      ygap: compact ? 0.5 : 1,
      hoverongaps: false,
      hovertemplate: "%{text}<extra></extra>",
      colorbar: Report.plots.colorbar(colors, title, scale.ticks),
    };
  }

  function categoryTrace(z, text, columns, colors, { compact }) {
    const steps = CATEGORIES.flatMap((category, index) => [
      [index / CATEGORIES.length, colors[category.color]],
      [(index + 1) / CATEGORIES.length, colors[category.color]],
    ]);
    return {
      type: "heatmap",
      z,
      text,
      x: columns.map((_, index) => index),
      colorscale: steps,
      zmin: -0.5,
      zmax: CATEGORIES.length - 0.5,
      showscale: false,
      xgap: compact ? 0.5 : 1,
      ygap: compact ? 0.5 : 1,
      hoverongaps: false,
      hovertemplate: "%{text}<extra></extra>",
    };
  }

  function layerAxis(columns) {
    const every = columns.length > 60 ? 8 : columns.length > 16 ? 4 : 1;
    const shown = columns.map((layer, index) => [layer, index]).filter(([layer]) => layer < 0 || layer % every === 0);
    return {
      title: "layer",
      tickvals: shown.map(([, index]) => index),
      ticktext: shown.map(([layer]) => (layer < 0 ? "–" : String(layer))),
      range: [-0.5, columns.length - 0.5],
      showgrid: false,
      zeroline: false,
      fixedrange: true,
    };
  }

  function siteAxis(rows, { compact }) {
    return {
      tickvals: rows.map((_, index) => index),
      ticktext: rows.map(short),
      tickfont: { size: compact ? 9 : 11, color: Report.plots.variable("muted") },
      range: [rows.length - 0.5, -0.5],
      showgrid: false,
      zeroline: false,
      fixedrange: true,
    };
  }

  /* A line between the sites of one module and the next. */
  function moduleLines(rows, columns, colors) {
    const module = (site) => site.split(".")[0];
    return rows.flatMap((site, index) =>
      index && module(site) !== module(rows[index - 1])
        ? [
            {
              type: "line",
              x0: -0.5,
              x1: columns.length - 0.5,
              y0: index - 0.5,
              y1: index - 0.5,
              line: { color: colors.sheet, width: 3 },
            },
          ]
        : [],
    );
  }

  function ring(place, { rows, columns }, colors) {
    const [x, y] = place ? [columns.indexOf(place.layer), rows.indexOf(place.site)] : [-1, -1];
    if (x < 0 || y < 0) return [];
    const box = { type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5 };
    return [
      { ...box, line: { color: colors.sheet, width: 4 } },
      { ...box, line: { color: colors.ink, width: 2 } },
    ];
  }

  /* The words of the marked cell, towards the side on which there is room. */
  function callout({ rows, columns, marked }, colors) {
    const [x, y] = [columns.indexOf(marked.layer), rows.indexOf(marked.site)];
    const left = x > columns.length / 2;
    return {
      x,
      y,
      text: plain(marked.text),
      showarrow: true,
      arrowhead: 0,
      arrowwidth: 1.5,
      arrowcolor: colors.ink,
      ax: left ? -26 : 26,
      ay: y > rows.length / 2 ? -30 : 30,
      xanchor: left ? "right" : "left",
      bgcolor: colors.sheet,
      bordercolor: colors.ink,
      borderpad: 4,
      font: { size: 12, color: colors.ink },
    };
  }

  /* What the special colours mean, only where they are there to be seen. */
  function legend(node, view) {
    const seen = new Set();
    for (const site of view.rows) {
      for (const layer of view.columns)
        seen.add(
          categoryOf(view.valueAt(site, layer), view.scale) ?? (view.valueAt(site, layer) === null ? "missing" : ""),
        );
    }
    const entries = [...CATEGORIES, { name: "missing", color: "missing", text: "not captured, or no such figure" }];
    fill(
      node,
      entries
        .filter(({ name }) => seen.has(name))
        .map(({ color, text }) => {
          return h("span", { class: "key" }, Report.dom.swatch(`var(--${color})`), text);
        }),
    );
  }

  const describe = ({ site, layer }) => `${site}, ${layerText(layer)}`;

  return { draw, legend, describe, heightOf };
})();
