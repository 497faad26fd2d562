"use strict";

/* What blocks of elements share: the exponents of their scales under both rules and GEMMs, and maps of their SQNR. */

Report.blocks = (() => {
  const { fill, one, plot } = Report.dom;
  const { count } = Report.numbers;
  const HEIGHT = 250;
  const ORDINALS = ["first", "second"];

  function scalesOf(detail, format, rule, gemm) {
    const scales = detail?.scales?.[Report.data.treatmentName(format, rule, gemm)];
    return scales?.counts?.length ? scales : null;
  }

  /* The exponent that this share of the blocks does not exceed. */
  function quantile({ first, counts }, share) {
    const total = counts.reduce((sum, value) => sum + value, 0);
    let seen = 0;
    for (let index = 0; index < counts.length; index += 1) {
      seen += counts[index];
      if (counts[index] && seen >= share * total) return first + index;
    }
    return first + counts.length - 1;
  }

  function draw(root, choice) {
    drawScales(root, choice);
    drawMaps(root, choice);
  }

  /* The format's own scales, or those of the first MX format where it has none. */
  function drawScales(root, { detail, format, site }) {
    const part = one("[data-part=scales]", root);
    const named = [format, ...Report.data.formats.map((entry) => entry.name)].find((name) =>
      scalesOf(detail, name, "floor", 1),
    );
    part.hidden = !named;
    if (!named) return;
    const gemms = [1, 2].filter((gemm) => scalesOf(detail, named, "floor", gemm));
    const title = Report.controls.formatTitle(named);
    fill(
      one("[data-role=scales-note]", root),
      `Exponents of ${title}'s E8M0 scales. The floor rule takes the exponent of the block's largest magnitude less the format's; rceil goes one up where that would saturate.`,
    );
    const all = gemms
      .flatMap((gemm) => ["floor", "rceil"].map((rule) => scalesOf(detail, named, rule, gemm)))
      .filter(Boolean);
    const range = [
      Math.min(...all.map((scale) => scale.first)) - 0.8,
      Math.max(...all.map((scale) => scale.first + scale.counts.length)) - 0.2,
    ];
    const top = Math.max(...all.flatMap((scale) => scale.counts));
    const place = one("[data-role=scales]", root);
    fill(
      place,
      gemms.map((gemm) => plot(`scales-${gemm}`, `Scale exponents of blocks, ${ORDINALS[gemm - 1]} GEMM`)),
    );
    gemms.forEach((gemm, index) => {
      const name = Report.data.axes.gemms[site]?.[gemm - 1];
      Report.plots.draw(place.children[index], (colors) =>
        scaleFigure({ detail, named, gemm, name, range, top }, colors),
      );
    });
  }

  function scaleFigure({ detail, named, gemm, name, range, top }, colors) {
    const traces = ["floor", "rceil"]
      .map((rule) => [rule, scalesOf(detail, named, rule, gemm)])
      .filter(([, scales]) => scales)
      .map(([rule, { first, counts }]) => ({
        type: "bar",
        name: rule,
        x: counts.map((_, index) => first + index),
        y: counts,
        text: counts.map((value, index) => `${rule}: scale 2<sup>${first + index}</sup><br>${count(value)} blocks`),
        textposition: "none",
        hovertemplate: "%{text}<extra></extra>",
        marker: {
          color: rule === "floor" ? Report.plots.formatColor(named) : "rgba(0,0,0,0)",
          line: { color: Report.plots.formatColor(named), width: rule === "floor" ? 0 : 1.5 },
        },
      }));
    return {
      traces,
      layout: {
        height: HEIGHT,
        barmode: "group",
        bargap: 0.15,
        margin: { l: 56, r: 8, t: 34, b: 46 },
        legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom" },
        annotations: [
          heading(name ? `${ORDINALS[gemm - 1]} GEMM: ${Report.numbers.plain(name)}` : "along the last axis", colors),
        ],
        xaxis: { title: "scale", range, ...Report.plots.powers(...range, 10), showgrid: false, zeroline: false },
        yaxis: { title: "blocks", ...Report.plots.decades(-0.3, Math.log10(top) + 0.2, 5) },
      },
    };
  }

  /* A line above the left end of a plot, which says what it shows. */
  function heading(text, colors) {
    const place = { x: 0, xref: "paper", xanchor: "left", y: 1.03, yref: "paper", yanchor: "bottom" };
    return { ...place, text, showarrow: false, font: { size: 12, color: colors.ink } };
  }

  function drawMaps(root, { cell, site }) {
    const part = one("[data-part=blocks]", root);
    const maps = (Report.data.block_maps ?? []).filter((map) => map.cell === cell);
    part.hidden = !maps.length;
    if (!maps.length) return;
    fill(
      one("[data-role=blocks-note]", root),
      "Each pixel is a block (or the worst of its neighbours where there are more blocks than pixels). Dark blocks lose most.",
    );
    const place = fill(
      one("[data-role=blocks]", root),
      maps.map((map, index) => plot(`blocks-${index}`, `SQNR by block, ${Report.controls.formatTitle(map.format)}`)),
    );
    maps.forEach((map, index) => Report.plots.draw(place.children[index], (colors) => mapFigure(map, site, colors)));
  }

  function mapFigure(map, site, colors) {
    const z = Report.data.rowsOf(map);
    const scale = Report.scales.of("db", z.flat());
    const title = Report.controls.formatTitle(map.format);
    const gemm = typeof map.gemm === "number" ? Report.data.axes.gemms[site]?.[map.gemm] : map.gemm;
    return {
      traces: [
        {
          type: "heatmap",
          x: Report.plots.middles(map.shape[1], map.blocks),
          y: Report.plots.middles(map.shape[0], map.rows),
          z,
          colorscale: scale.colors,
          zmin: scale.range[0],
          zmax: scale.range[1],
          hovertemplate: "row %{y}, block %{x}<br>SQNR %{z:.1f} dB<extra></extra>",
          colorbar: Report.plots.colorbar(colors, "dB", scale.ticks),
        },
      ],
      layout: {
        height: 320,
        margin: { l: 48, r: 8, t: 34, b: 44 },
        plot_bgcolor: colors.missing,
        annotations: [heading(Report.numbers.plain([title, gemm].filter(Boolean).join(", ")), colors)],
        xaxis: { title: "blocks along the sum", showgrid: false, zeroline: false },
        yaxis: { title: "rows", autorange: "reversed", showgrid: false, zeroline: false },
      },
    };
  }

  return { draw, scalesOf, quantile };
})();
