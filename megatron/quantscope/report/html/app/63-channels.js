"use strict";

/* Where the large values sit: the largest magnitude of each channel, and tokens by channels where a tile was kept. */

Report.channels = (() => {
  const { h, fill, one } = Report.dom;
  const { magnitude, plain } = Report.numbers;
  const HEIGHT = 380;
  const NAMED = 3; // channels with their numbers beside the bars
  const SEEN = 0.12; // share of the largest under which a bar of a linear axis is too low for a name
  const STANDS_OUT = 2; // times the median of the tiles' maxima, from which a channel is worth a name

  function draw(root, choice) {
    const has = {
      channels: choice.detail?.channels?.values?.length,
      surface: Report.data.surfaceByCell.has(choice.cell),
    };
    for (const name of Object.keys(has)) one(`[data-part=${name}]`, root).hidden = !has[name]; // before widths are measured
    if (has.channels) drawChannels(root, choice);
    if (has.surface) drawSurface(root, choice);
  }

  function drawChannels(root, { detail, params, type }) {
    const { channels } = detail;
    const node = one("[data-plot=channels]", root);
    const top = detail.top_channels ?? [];
    fill(one("[data-role=channels-note]", root), noteOf(channels, top));
    Report.plots.draw(node, (colors) =>
      channelFigure(channels, top, params.channels === "log", Report.plots.runColor(type), colors),
    );
  }

  /* Maxima are packed as steps of log2; null: nothing but zeros. */
  function valuesOf({ values, per_binade }) {
    return values.map((step) => (step === null ? 0 : 2 ** (step / per_binade)));
  }

  function noteOf({ width, values }, top) {
    const each = width / values.length;
    const tiles =
      each > 1
        ? `Each bar is the largest of ${each > 2 ? `about ${Math.round(each)}` : "one or two"} neighbouring channels. `
        : "";
    if (!top.length) return tiles;
    return [
      tiles,
      "Largest: ",
      h(
        "span",
        { class: "numbers-run" },
        top.map(([channel, value], index) => [
          index ? ", " : "",
          "channel ",
          h("b", {}, channel),
          ` ${magnitude(value)}`,
        ]),
      ),
      ".",
    ];
  }

  function channelFigure(channels, top, log, color, colors) {
    const values = valuesOf(channels);
    const total = channels.width;
    const edges = Array.from({ length: values.length + 1 }, (_, index) => Math.floor((index * total) / values.length));
    const widths = values.map((_, index) => edges[index + 1] - edges[index]);
    const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
    const median = sorted[Math.floor(sorted.length / 2)] ?? 0;
    const largest = sorted.at(-1) || 1;
    const least = Math.max(STANDS_OUT * median, log ? 0 : SEEN * largest);
    const named = apart(top.filter(([, value]) => value > least).slice(0, NAMED), total);
    const text = values.map(
      (value, index) =>
        `channel${widths[index] > 1 ? `s ${edges[index]} to ${edges[index + 1] - 1}` : ` ${edges[index]}`}<br>${magnitude(value)}`,
    );
    return {
      traces: [
        {
          type: "bar",
          x: values.map((_, index) => (edges[index] + edges[index + 1] - 1) / 2),
          y: values,
          width: widths,
          text,
          textposition: "none",
          marker: { color, line: { width: 0 } },
          hovertemplate: "%{text}<extra></extra>",
        },
      ],
      layout: {
        height: HEIGHT,
        bargap: 0,
        margin: { l: 62, r: 12, t: 26, b: 46 },
        xaxis: { title: "channel", range: [-0.01 * total, 1.01 * total], showgrid: false, zeroline: false },
        yaxis: log
          ? {
              title: "largest magnitude",
              ...Report.plots.decades(
                Math.log10(sorted.find((value) => value > 0) ?? largest / 10) - 0.2,
                Math.log10(largest) + 0.4,
              ),
            }
          : { title: "largest magnitude", range: [0, largest * 1.12], separatethousands: true },
        annotations: named.map(([channel, value]) => label(channel, value, log, channel > total / 2, colors)),
      },
    };
  }

  /* Labels of channels that are neighbours would lie on each other: the larger one keeps its own. */
  function apart(top, total) {
    const kept = [];
    for (const [channel, value] of top) {
      if (
        kept.every(([other, size]) => Math.abs(other - channel) > total / 6 || Math.abs(size - value) > kept[0][1] / 8)
      )
        kept.push([channel, value]);
    }
    return kept;
  }

  function label(channel, value, log, left, colors) {
    return {
      x: channel,
      y: log ? Math.log10(value) : value,
      text: `<b>channel ${channel}</b>: ${plain(magnitude(value))}`,
      showarrow: true,
      arrowhead: 0,
      arrowcolor: colors.muted,
      ax: left ? -14 : 14,
      ay: 0,
      xanchor: left ? "right" : "left",
      bgcolor: colors.sheet,
      borderpad: 1,
      font: { size: 12, color: colors.ink },
    };
  }

  function drawSurface(root, { cell, params }) {
    const surface = Report.data.surfaceByCell.get(cell);
    const node = one("[data-plot=surface]", root);
    const flat = params.surface === "flat" || !hasWebgl();
    const [token, channel] = surface.peak;
    const rows = Report.data.rowsOf(surface);
    fill(
      one("[data-role=surface-note]", root),
      `|x| of ${surface.tokens} tokens by ${surface.channels} channels, largest of each tile. The peak stands at token ${token}, channel ${channel}.${params.surface !== "flat" && flat ? " This browser has no WebGL, so the map is flat." : ""}`,
    );
    if (node.dataset.kind !== (flat ? "flat" : "3d")) Report.plots.clear(node);
    node.dataset.kind = flat ? "flat" : "3d";
    Report.plots.draw(node, (colors) =>
      (flat ? flatFigure : solidFigure)({ surface, rows, distance: node.clientWidth < 480 ? 1.5 : 1 }, colors),
    );
  }

  let webgl = null;

  function hasWebgl() {
    webgl ??= Boolean(document.createElement("canvas").getContext("webgl"));
    return webgl;
  }

  function axesOf({ tokens, channels, shape: [height, width] }) {
    return { x: Report.plots.middles(width, channels), y: Report.plots.middles(height, tokens) };
  }

  function flatFigure({ surface, rows }, colors) {
    const scale = Report.scales.of(
      "log2",
      rows.flat().filter((value) => value > 0),
    );
    const low = Math.max(scale.range[0], scale.range[1] - 24);
    return {
      traces: [
        {
          type: "heatmap",
          ...axesOf(surface),
          z: rows.map((row) => row.map((value) => (value > 0 ? Math.log2(value) : null))),
          text: rows.map((row) => row.map(magnitude)),
          colorscale: scale.colors,
          zmin: low,
          zmax: scale.range[1],
          hovertemplate: "token %{y}, channel %{x}<br>%{text}<extra></extra>",
          colorbar: Report.plots.colorbar(colors, "|x|", scale.ticks),
        },
      ],
      layout: {
        height: HEIGHT,
        margin: { l: 52, r: 8, t: 12, b: 46 },
        plot_bgcolor: colors.missing,
        xaxis: { title: "channel", showgrid: false, zeroline: false },
        yaxis: { title: "token", autorange: "reversed", showgrid: false, zeroline: false },
      },
    };
  }

  function solidFigure({ surface, rows, distance }, colors) {
    const axis = (title) => ({
      title: { text: title, font: { color: colors.muted, size: 12 } },
      color: colors.muted,
      gridcolor: colors.line,
      backgroundcolor: colors.sheet,
      showbackground: true,
      zerolinecolor: colors.line,
      tickfont: { size: 10 },
    });
    return {
      traces: [
        {
          type: "surface",
          ...axesOf(surface),
          z: rows,
          colorscale: Report.scales.VIRIDIS,
          showscale: false,
          contours: { x: { highlight: false }, y: { highlight: false }, z: { highlight: false } },
          lighting: { ambient: 0.75, diffuse: 0.5, specular: 0.05 },
          hovertemplate: "token %{y}, channel %{x}<br>%{z:.4g}<extra></extra>",
        },
      ],
      layout: {
        height: HEIGHT,
        margin: { l: 0, r: 0, t: 0, b: 0 },
        uirevision: "surface",
        scene: {
          xaxis: axis("channel"),
          yaxis: axis("token"),
          zaxis: axis("|x|"),
          aspectratio: { x: 1.25, y: 1, z: 0.6 },
          camera: {
            eye: { x: -1.15 * distance, y: -1.2 * distance, z: 0.65 * distance },
            center: { x: 0, y: 0, z: -0.12 },
          },
        },
      },
    };
  }

  return { draw };
})();
