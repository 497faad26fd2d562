"use strict";

/* The exponent histogram with a format's underflow, subnormal, normal and overflow ranges behind it.

   Elements are counted by binade: bin e holds 2^e <= |x| < 2^(e+1). A format without a scale has one range. A scale
   moves it: by amax over the whole tensor, or block by block, where the range drawn is that of one block and its
   place is said in words. The percents of underflow and saturation are exact, over all blocks. */

Report.exponents = (() => {
  const { h, fill, one } = Report.dom;
  const { percent, count, isNumber } = Report.numbers;
  const HEIGHT = 330;
  const ZERO_GAP = 2.5; // bins between the zeros' bar and the others
  const LABEL = 56; // pixels that the name of a band takes
  const TICK = 52; // pixels from one tick to the next, at least
  const BAND_COLORS = { underflow: "band-under", subnormal: "band-sub", normal: "band-normal", overflow: "band-over" };

  function draw(root, choice) {
    const node = one("[data-plot=exponents]", root);
    const note = one("[data-role=exponents-note]", root);
    const keys = one("[data-role=exponents-keys]", root);
    const histogram = choice.detail?.exponents;
    if (!histogram?.counts?.length) {
      Report.plots.clear(node);
      fill(keys);
      return fill(note, "No element is finite and other than zero, so there are no exponents to count.");
    }
    const format = Report.data.formatByName.get(choice.format);
    const moved = shiftOf(format, choice);
    fill(note, explanation(format, moved, choice));
    fill(keys, format && moved.shift !== null ? format.spans.map(bandKey) : null);
    return Report.plots.draw(node, (colors) =>
      figure(histogram, format, moved, { ...choice, width: node.clientWidth }, colors),
    );
  }

  /* The binades by which a scale moves the format's range, and in words which scale it is. */
  function shiftOf(format, { detail, rule, gemm, params, site }) {
    const top = Math.log2(detail.amax || 1);
    const overflow = format?.spans.find((span) => span.name === "overflow")?.lower ?? 0;
    if (!format?.scale) return { shift: rule === "pow2" && isGradient(site) ? null : 0 };
    if (format.scale === "fp32")
      return {
        shift: top - overflow,
        words: "one scale for the tensor puts its largest magnitude at the end of the range",
      };
    if (format.scale !== "e8m0")
      return {
        shift: top - overflow,
        words: "each block has a scale of its own; this is the range of the block that holds the largest magnitude",
      };
    const scales = Report.blocks.scalesOf(detail, format.name, rule, gemm);
    if (!scales)
      return {
        shift: Math.floor(top) - Math.floor(overflow),
        words: "each block has a scale of its own; this is the range of the block that holds the largest magnitude",
      };
    const which = ["smallest", "largest"].includes(params.blocks) ? params.blocks : "median";
    const picked = Report.blocks.quantile(scales, { smallest: 0, median: 0.5, largest: 1 }[which]);
    const [low, high] = [0, 1].map((share) => Report.blocks.quantile(scales, share));
    return {
      shift: picked,
      words: [
        "each block of ",
        format.block,
        " has a scale of its own, from ",
        two(low),
        " to ",
        two(high),
        `; this is the range of a block with the ${which} one, `,
        two(picked),
      ],
    };
  }

  const two = (exponent) => ["2", h("sup", {}, String(exponent).replace("-", "−"))];
  const isGradient = (site) => String(Report.data.axes.families[site]).includes("gradient");

  function explanation(format, { shift, words }, { format: name, rule, gemm, cell }) {
    if (!format) return "Elements by binade.";
    const column = (metric) => Report.data.value(Report.data.columnName(metric, { format: name, rule, gemm }), cell);
    const figures = [
      ["underflow", "underflow"],
      ["saturated", "saturate"],
      ["lost", "are lost"],
    ]
      .map(([metric, verb]) => [column(metric), verb])
      .filter(([value]) => isNumber(value))
      .map(([value, verb]) => `${percent(value)} ${verb}`);
    const range =
      shift === null
        ? "a power of two scales the tensor first, so its range is not fixed"
        : (words ?? "it has no scale, so its range stands where it is");
    return [
      `Elements by binade against the range of ${format.title}: `,
      range,
      ". ",
      figures.length ? `Over the whole tensor: ${figures.join(", ")}.` : "",
    ];
  }

  function figure({ first, counts }, format, { shift }, { detail, type, cell, width }, colors) {
    const last = first + counts.length;
    const zeros = Math.round(((detail.zero_percent ?? Report.data.value("zero_percent", cell) ?? 0) / 100) * detail.n);
    const zeroAt = first - ZERO_GAP;
    const range = [zeros ? zeroAt - 1.5 : first - 1.5, last + 2];
    const bands = format && shift !== null ? bandsOf(format, shift, zeros ? first - 1.2 : range[0], range[1]) : [];
    const ticks = Report.plots.powers(first, last, Math.min(12, Math.floor(width / TICK)));
    return {
      traces: [
        bars(
          counts.map((_, index) => first + index + 0.5),
          counts,
          counts.map((_, index) => `2<sup>${first + index}</sup> ≤ |x| < 2<sup>${first + index + 1}</sup>`),
          detail.n,
          Report.plots.runColor(type),
          "elements",
        ),
        ...(zeros ? [bars([zeroAt], [zeros], ["zero"], detail.n, colors.muted, "zeros")] : []),
      ],
      layout: {
        height: HEIGHT,
        margin: { l: 60, r: 16, t: 26, b: 46 },
        bargap: 0.06,
        showlegend: false,
        shapes: bands.flatMap((band) => shapesOf(band)),
        annotations: bands
          .filter((band) => (width * (band.x1 - band.x0)) / (range[1] - range[0]) > LABEL)
          .map((band) => labelOf(band, colors)),
        xaxis: {
          title: "magnitude",
          range,
          tickvals: zeros ? [zeroAt, ...ticks.tickvals] : ticks.tickvals,
          ticktext: zeros ? ["zero", ...ticks.ticktext] : ticks.ticktext,
          showgrid: false,
          zeroline: false,
        },
        yaxis: { title: "elements", ...Report.plots.decades(-0.3, Math.log10(Math.max(...counts, zeros)) + 0.35) },
      },
    };
  }

  function bars(x, y, texts, total, color, name) {
    return {
      type: "bar",
      x,
      y,
      width: x.length === 1 ? 1 : undefined,
      name,
      text: y.map((value, index) => `${texts[index]}<br>${count(value)} elements, ${percent((100 * value) / total)}`),
      textposition: "none",
      marker: { color },
      hovertemplate: "%{text}<extra></extra>",
    };
  }

  /* Bands that are too narrow for their names have colours still. */
  function bandKey({ name }) {
    return h("span", { class: "key" }, Report.dom.swatch(`var(--${BAND_COLORS[name] ?? "band-normal"})`), name);
  }

  function bandsOf(format, shift, low, high) {
    const clamp = (exponent, open) => Math.min(high, Math.max(low, exponent === null ? open : exponent + shift));
    return format.spans
      .map((span) => ({
        name: span.name,
        x0: clamp(span.lower, low),
        x1: clamp(span.upper, high),
        edge: span.lower === null ? null : span.lower + shift,
      }))
      .filter((band) => band.x1 > band.x0);
  }

  function shapesOf({ name, x0, x1, edge }) {
    const band = {
      type: "rect",
      xref: "x",
      yref: "paper",
      x0,
      x1,
      y0: 0,
      y1: 1,
      layer: "below",
      line: { width: 0 },
      fillcolor: Report.plots.variable(BAND_COLORS[name] ?? "band-normal"),
    };
    const line = {
      type: "line",
      xref: "x",
      yref: "paper",
      x0,
      x1: x0,
      y0: 0,
      y1: 1,
      layer: "below",
      line: { width: 1, dash: "dot", color: Report.plots.variable("muted") },
    };
    return edge !== null && edge === x0 ? [band, line] : [band];
  }

  function labelOf({ name, x0, x1 }, colors) {
    return {
      x: (x0 + x1) / 2,
      y: 1,
      yref: "paper",
      yanchor: "bottom",
      text: name,
      showarrow: false,
      font: { size: 11, color: name === "overflow" || name === "underflow" ? colors.alarm : colors.muted },
    };
  }

  /* A small histogram without bands, for the runs side by side. */
  function sketch({ first, counts }, range, top, color, height) {
    return {
      traces: [
        {
          type: "bar",
          x: counts.map((_, index) => first + index + 0.5),
          y: counts,
          marker: { color },
          hovertemplate: "2<sup>%{customdata}</sup>: %{y}<extra></extra>",
          customdata: counts.map((_, index) => first + index),
        },
      ],
      layout: {
        height,
        margin: { l: 34, r: 6, t: 4, b: 26 },
        bargap: 0.06,
        xaxis: { range, ...Report.plots.powers(...range, 4), showgrid: false, zeroline: false },
        yaxis: Report.plots.decades(-0.3, Math.log10(top) + 0.2, 3),
      },
    };
  }

  return { draw, sketch };
})();
