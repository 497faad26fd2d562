"use strict";

/* What each format costs: SQNR of all operands of a run as a box a format and rule. */

Report.costs = (() => {
  const { fill, one } = Report.dom;
  const { plain } = Report.numbers;
  const FORMAT_ROW = 26;
  const NARROW = 700; // pixels under which the words beside the boxes have no room

  /* One box a format and rule over all operands of the run, along the first GEMM's axis. */
  function draw(root, choice) {
    const boxes = Report.data.formats
      .flatMap((format) => (format.rules.length ? format.rules : [""]).map((rule) => boxOf(format, rule, choice)))
      .filter(Boolean);
    const note = one("[data-role=formats-note]", root);
    if (!boxes.length) return void fill(note, "The capture has no figures of formats.");
    fill(
      note,
      `SQNR of every GEMM operand of the ${Report.controls.runTitle(choice.type)} run, quantised offline: the box holds half of them, the line is the median; 6 dB are one bit. Points lie more than 1.5 boxes out. A click opens the format's heatmap.`,
    );
    const node = one("[data-plot=formats]", root);
    return Report.plots
      .draw(node, (colors) => ({
        traces: boxes.map((box) => boxTrace(box, colors)),
        layout: layoutOf(boxes, node.clientWidth >= NARROW, colors),
      }))
      .then(() => Report.plots.onClick(node, (point) => open(boxes[point.curveNumber])));
  }

  function layoutOf(boxes, wide, colors) {
    const words = (box) => ({
      x: 1,
      xref: "paper",
      xanchor: "left",
      xshift: 6,
      y: plain(box.title),
      text: box.words,
      showarrow: false,
      font: { size: 11, color: colors.muted },
    });
    return {
      height: boxes.length * FORMAT_ROW + 70,
      showlegend: false,
      margin: { l: 130, r: wide ? 190 : 12, t: 8, b: 44 },
      xaxis: { title: "SQNR, dB", zeroline: false, range: rangeOf(boxes) },
      yaxis: { autorange: "reversed", showgrid: false },
      annotations: wide ? boxes.map(words) : [],
    };
  }

  function open(box) {
    if (!box) return;
    const { format, rule } = box;
    const choice = { ...Report.router.carried(), metric: "sqnr", format: format.name, rule, tensor: "operands" };
    Report.router.go(Report.router.hashOf("heatmap", [], choice));
  }

  /* Formats of at most 8 bits fill the axis; what 16 bits do better is told in words. */
  function rangeOf(boxes) {
    const narrow = boxes.filter(({ format }) => (format.bits ?? 8) <= 8).flatMap(({ numbers }) => numbers);
    const [low, high] = Report.scales.rangeOf(narrow.length ? narrow : boxes.flatMap(({ numbers }) => numbers));
    return [Math.min(0, low - 1), high * 1.05 + 1];
  }

  function boxOf(format, rule, choice) {
    const column = Report.data.columnName("sqnr", { format: format.name, rule });
    const values = Report.data.valuesOf(column);
    if (!values) return null;
    const { axes, cells } = Report.data;
    const [type, iteration, rank] = [
      axes.types.indexOf(choice.type),
      axes.iterations.indexOf(choice.iteration),
      axes.ranks.indexOf(choice.rank),
    ];
    const operands = new Set(axes.operands.map((site) => axes.sites.indexOf(site)));
    const picked = [];
    for (let cell = 0; cell < values.length; cell += 1) {
      if (
        cells.type[cell] === type &&
        cells.iteration[cell] === iteration &&
        cells.rank[cell] === rank &&
        operands.has(cells.site[cell])
      )
        picked.push(values[cell]);
    }
    const tally = (word) => picked.filter((value) => value === word).length;
    const special = ["exact", "lost"]
      .map((word) => [tally(word), word])
      .filter(([number]) => number)
      .map(([number, word]) => `${number} ${word}`)
      .join(", ");
    const numbers = picked.filter(Number.isFinite);
    if (!numbers.length && !special) return null;
    const middle = numbers.length ? `median ${medianOf(numbers).toFixed(1)} dB` : "";
    const words = [special, special && middle ? `rest ${middle}` : middle].filter(Boolean).join(", ");
    const suffix = rule && rule !== format.rules[0] ? `, ${rule}` : "";
    return { format, rule, numbers, words, title: `${format.title}${suffix}` };
  }

  function medianOf(numbers) {
    const sorted = [...numbers].sort((a, b) => a - b);
    return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.floor(sorted.length / 2)]) / 2;
  }

  function boxTrace({ format, title, numbers, rule }) {
    const color = Report.plots.formatColor(format.name);
    const hollow = rule && rule !== format.rules[0];
    return {
      type: "box",
      orientation: "h",
      x: numbers.length ? numbers : [null],
      y: Array(Math.max(1, numbers.length)).fill(plain(title)),
      name: plain(title),
      boxpoints: "outliers",
      marker: { color, size: 3, opacity: 0.7 },
      line: { color, width: 1.6 },
      fillcolor: hollow ? "rgba(0,0,0,0)" : undefined,
      hoverinfo: "x",
      width: 0.62,
    };
  }

  return { draw };
})();
