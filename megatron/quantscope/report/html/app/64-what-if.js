"use strict";

/* What every format, rule and GEMM would do to the tensor: a table out of the cell's columns, the best of each marked. */

Report.whatIf = (() => {
  const { h, fill, one, swatch } = Report.dom;
  const { isNumber, ofMetric } = Report.numbers;
  const METRICS = ["sqnr", "relative_error", "underflow", "saturated", "lost", "dead_blocks"];
  const BAR_DECIBELS = 50;
  const MOST_BEST = 3; // more equals than that, and the mark says nothing

  /* -> [{format, rule, gemm, key}] of the columns that have a value for this cell, in the order of the formats. */
  function treatments(cell, site) {
    const found = [];
    for (const format of Report.data.formats) {
      for (const rule of rulesOf(format, site)) {
        for (const gemm of [1, 2]) {
          const key = Report.data.treatmentName(format.name, rule, gemm);
          if (METRICS.some((metric) => Report.data.value(`${metric}/${key}`, cell) !== null)) {
            found.push({ format, rule, gemm, key });
          }
        }
      }
    }
    return found;
  }

  /* The power of two that scales gradients says nothing to other tensors. */
  function rulesOf({ rules, scale }, site) {
    if (!rules?.length) return [""];
    const gradient = String(Report.data.axes.families[site]).includes("gradient");
    return scale === "e8m0" || gradient ? rules : [rules[0]];
  }

  function draw(root, { cell, site, format, rule, gemm }) {
    const part = one("[data-part=what-if]", root);
    const rows = treatments(cell, site);
    part.hidden = !rows.length;
    if (part.hidden) return;
    const gemms = Report.data.axes.gemms[site] ?? [];
    fill(
      one("[data-role=what-if-note]", root),
      gemms.length
        ? "The tensor as captured, quantised offline along the axis that each GEMM sums over. ★ marks the best of a column."
        : "The tensor is a result, no GEMM quantises it: tried along its last axis. ★ marks the best of a column.",
    );
    const metrics = METRICS.filter(
      (metric) =>
        Report.data.metricById.has(metric) &&
        rows.some((row) => Report.data.value(`${metric}/${row.key}`, cell) !== null),
    );
    const best = Object.fromEntries(metrics.map((metric) => [metric, bestOf(metric, rows, cell)]));
    const chosen = Report.data.treatmentName(format, rule, gemm);
    const body = rows.map((row, index) => {
      const first = index === 0 || rows[index - 1].format !== row.format;
      const figures = metrics.map((metric) => cellOf(metric, row, cell, best[metric]));
      return line(row, { site, first, chosen: row.key === chosen, gemm: gemmText(row, gemms, rows) }, figures);
    });
    fill(
      one("[data-role=what-if]", root),
      h(
        "table",
        { class: "plain", "data-role": "what-if-table" },
        h("thead", {}, h("tr", {}, headings(metrics))),
        h("tbody", {}, body),
      ),
    );
  }

  function headings(metrics) {
    const plain = ["format", "scale rule", "GEMM"].map((title) => h("th", { scope: "col" }, title));
    const figures = metrics
      .map((metric) => Report.data.metricById.get(metric))
      .map(({ title, help }) => h("th", { scope: "col", class: "number", title: help }, title));
    return [...plain, ...figures];
  }

  function line(row, { site, first, chosen, gemm }, figures) {
    const { format, rule } = row;
    const name = h("a", { href: hashOf(row) }, swatch(format.color), format.title);
    const classes = [first && "first", chosen && "chosen"].filter(Boolean).join(" ");
    return h(
      "tr",
      { class: classes || null, "aria-current": chosen && "true" },
      h("th", { scope: "row" }, first ? name : null),
      h("td", {}, format.scale || rulesOf(format, site).length > 1 ? rule || "–" : "–"),
      h("td", {}, gemm),
      figures,
    );
  }

  function hashOf({ format, rule, gemm }) {
    const { parts, params } = Report.router.state();
    return Report.router.hashOf("tensor", parts, { ...params, format: format.name, rule, gemm });
  }

  /* Where only one figure is there it holds for both GEMMs, as blocks do not matter to the format. */
  function gemmText({ format, gemm }, gemms, rows) {
    const both = !rows.some((row) => row.format === format && row.gemm === 2);
    if (both && gemms.length > 1) return "both";
    return gemms[gemm - 1] ?? (gemm === 1 ? "–" : "second");
  }

  function cellOf(metric, { key, format }, cell, best) {
    const value = Report.data.value(`${metric}/${key}`, cell);
    const entry = Report.data.metricById.get(metric);
    const mark = best.has(key) ? h("span", { class: "best", title: "best of the column" }, "★ ") : null;
    const td = h(
      "td",
      { class: `number ${value === "lost" ? "alarm" : ""} ${metric === "sqnr" ? "bar" : ""}` },
      mark,
      ofMetric(entry, value),
    );
    td.style.setProperty("--bar", Report.plots.formatColor(format.name));
    if (metric === "sqnr" && isNumber(value))
      td.style.setProperty("--share", `${Math.min(100, Math.max(0, (100 * value) / BAR_DECIBELS))}%`);
    return td;
  }

  function bestOf(metric, rows, cell) {
    const sign = Report.data.metricById.get(metric).worse === "low" ? 1 : -1;
    const rank = (value) => (value === "exact" ? Infinity : isNumber(value) ? sign * value : -Infinity);
    const ranks = rows.map((row) => [row.key, rank(Report.data.value(`${metric}/${row.key}`, cell))]);
    const top = Math.max(...ranks.map(([, value]) => value));
    const winners = ranks.filter(([, value]) => value === top && value > -Infinity).map(([key]) => key);
    return new Set(winners.length <= MOST_BEST ? winners : []);
  }

  return { draw };
})();
