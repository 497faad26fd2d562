"use strict";

/* Run against baseline, tensor by tensor of the same samples: where they part, how the error grows, what is worst. */

Report.compare = (() => {
  const { h, fill, one, plot, empty, swatch } = Report.dom;
  const { magnitude, decibels, isNumber, layer: layerText } = Report.numbers;
  /* number: what is coloured and drawn, where it is not the column itself. */
  const METRICS = [
    { id: "sqnr_db", title: "SQNR", unit: "dB", scale: "agreement", worse: "low", write: decibels },
    { id: "relative_l2", title: "relative L2", unit: "", scale: "log", worse: "high", write: magnitude },
    {
      id: "cosine",
      title: "1 − cosine",
      unit: "",
      scale: "log",
      worse: "high",
      write: magnitude,
      number: (value) => Math.max(0, 1 - value),
    },
    { id: "max_error", title: "largest error", unit: "", scale: "log2", worse: "high", write: magnitude },
  ];

  function build(root) {
    fill(
      root,
      h("div", { class: "partings", "data-role": "partings" }),
      h("div", { class: "controls", "data-role": "controls" }),
      h(
        "article",
        { class: "card" },
        h("h2", { "data-role": "title" }),
        h("p", { class: "note", "data-role": "note" }),
        plot("compare", "Difference to the baseline by site and layer", "clickable"),
        h("p", { class: "keys", "data-role": "keys" }),
      ),
      h(
        "article",
        { class: "card" },
        h("h2", {}, "Growth along the depth"),
        h(
          "p",
          { class: "note" },
          "Lines are the median tensor of a layer, points every tensor of the chosen run: the forward pass from the first layer to the last, then the backward pass down again.",
        ),
        plot("growth", "Error along forward and backward pass"),
      ),
      h(
        "article",
        { class: "card" },
        h("h2", {}, "The worst tensors"),
        h("div", { class: "scroll short", "data-role": "worst", tabindex: 0 }),
      ),
    );
  }

  function choiceOf(params) {
    const { columns } = Report.data.comparison;
    const distinct = (name) => [...new Set(columns[name])];
    const runs = distinct("run");
    const run = Report.controls.chosen(params.run ?? params.type, runs);
    return {
      runs,
      run,
      iterations: distinct("iteration"),
      ranks: distinct("rank"),
      iteration: Report.controls.chosen(params.iteration, distinct("iteration")),
      rank: Report.controls.chosen(params.rank, distinct("rank")),
      colors: params.colors === "own" ? "own" : "",
      metric: METRICS.find((metric) => metric.id === params.metric) ?? METRICS[0],
    };
  }

  function render(root, { params }) {
    if (!Report.data.comparison) {
      const many = Report.data.runs.length > 1;
      return void fill(
        root,
        h(
          "article",
          { class: "card" },
          h("h2", {}, "Comparison"),
          empty(
            many
              ? "No two of these runs captured the same tensors of the same samples."
              : "This capture has one run. Capture the same samples with another type (batch mode does) to compare them.",
          ),
        ),
      );
    }
    if (!root.firstChild) build(root);
    const choice = choiceOf(params);
    Report.controls.bar(one("[data-role=controls]", root), specs(choice));
    fill(one("[data-role=partings]", root), partings(choice));
    const rows = rowsOf(choice, choice.run);
    Report.growth.draw(one("[data-plot=growth]", root), choice);
    Report.worst.draw(one("[data-role=worst]", root), rows, choice);
    return map(root, rows, choice);
  }

  function specs(choice) {
    const { options, runTitle } = Report.controls;
    return [
      { id: "run", label: "Run", options: options(choice.runs, runTitle), value: choice.run, always: true },
      {
        id: "metric",
        label: "Metric",
        options: METRICS.map(({ id, title }) => [id, title]),
        value: choice.metric.id,
        always: true,
      },
      { id: "iteration", label: "Iteration", options: options(choice.iterations), value: choice.iteration },
      { id: "rank", label: "Rank", options: options(choice.ranks), value: choice.rank },
      {
        id: "colors",
        label: "Colour range",
        options: [
          ["", "one for all runs"],
          ["own", "of this map"],
        ],
        value: choice.colors,
        always: true,
      },
    ];
  }

  /* A card a run: where it leaves the baseline, and where the difference begins to matter. */
  function partings(choice) {
    const { parting } = Report.data.comparison;
    return choice.runs.map((run) =>
      h(
        "article",
        { class: run === choice.run ? "parting current" : "parting", "data-run": run },
        h(
          "h3",
          {},
          swatch(Report.data.runByType.get(run)?.color ?? "var(--muted)"),
          h(
            "a",
            { href: Report.router.hashOf("compare", [], { ...Report.router.state().params, run }) },
            Report.controls.runTitle(run),
          ),
        ),
        h(
          "ul",
          {},
          parting.filter((entry) => entry.run === run).map((entry) => sentence(entry, choice)),
        ),
      ),
    );
  }

  /* The sentences begin with the run's name, which the card has as its title. */
  function sentence({ run, site, layer, text }, choice) {
    const known = site !== null && Report.data.axes.types.includes(run);
    const own = text.startsWith(`${run}: `) ? text.slice(run.length + 2) : text;
    const link = known ? h("a", { class: "whole", href: placeHash({ run, site, layer }, choice) }, "Show →") : null;
    return h("li", {}, own.charAt(0).toUpperCase() + own.slice(1), " ", link);
  }

  const placeHash = ({ run, site, layer }, { iteration, rank }) =>
    Report.router.tensorHash({ type: run, site, layer, iteration, rank });

  /* The rows of a run as records, the metric's number with them. */
  function rowsOf({ metric, iteration, rank }, run) {
    const { columns } = Report.data.comparison;
    const rows = [];
    for (let index = 0; index < columns.run.length; index += 1) {
      if (columns.run[index] !== run || columns.iteration[index] !== iteration || columns.rank[index] !== rank)
        continue;
      const row = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[index]]));
      const own = row[metric.id];
      rows.push({ ...row, value: row.equal ? "exact" : isNumber(own) && metric.number ? metric.number(own) : own });
    }
    return rows;
  }

  const weight = (value, { worse }) =>
    value === "lost" ? Infinity : isNumber(value) ? (worse === "low" ? -value : value) : -Infinity;

  function map(root, rows, choice) {
    const { metric, run } = choice;
    const places = new Map();
    for (const row of rows) {
      const key = Report.data.keyOf(row.site, row.layer);
      const other = places.get(key);
      if (!other || weight(row.value, metric) > weight(other.value, metric)) places.set(key, row);
    }
    const sites = Report.data.axes.sites.filter((site) => rows.some((row) => row.site === site));
    const layers = [...new Set(rows.map((row) => row.layer))].sort((a, b) => a - b);
    const rowAt = (site, layer) => places.get(Report.data.keyOf(site, layer));
    const view = {
      rows: sites,
      columns: layers,
      valueAt: (site, layer) => rowAt(site, layer)?.value ?? null,
      textAt: (site, layer) => hover(rowAt(site, layer)),
      scale: scaleOf(choice, rows),
      title: `${metric.title}${metric.unit ? ` (${metric.unit})` : ""}`,
    };
    const baseline = Report.controls.runTitle(Report.data.comparison.baseline);
    fill(one("[data-role=title]", root), `${metric.title}: ${Report.controls.runTitle(run)} against ${baseline}`);
    fill(
      one("[data-role=note]", root),
      `Each cell is the tensor of the ${Report.controls.runTitle(run)} run held against that of the ${baseline} run, the worst where there are several. ${Report.data.comparison.left_out ?? ""}`,
    );
    Report.grid.legend(one("[data-role=keys]", root), view);
    const node = one("[data-plot=compare]", root);
    node.places = { sites, layers, choice };
    return Report.grid.draw(node, view).then(() =>
      Report.plots.onClick(node, ({ x, y }) => {
        const shown = node.places;
        Report.router.go(
          placeHash({ run: shown.choice.run, site: shown.sites[y], layer: shown.layers[x] }, shown.choice),
        );
      }),
    );
  }

  function scaleOf({ metric, runs, colors, ...choice }, rows) {
    const numbers = (list) => list.map((row) => row.value).filter(isNumber);
    if (colors === "own") return Report.scales.of(metric.id === "sqnr_db" ? "binades" : metric.scale, numbers(rows));
    return Report.scales.of(
      metric.scale,
      runs.flatMap((run) => numbers(rowsOf({ metric, ...choice }, run))),
    );
  }

  function hover(row) {
    if (!row) return "";
    const lines = METRICS.map(
      ({ id, title, write, number }) =>
        `${title} ${isNumber(row[id]) && number ? write(number(row[id])) : write(row[id])}`,
    );
    return [
      `<b>${Report.numbers.plain(row.site)}</b> · ${layerText(row.layer)}`,
      row.operation,
      row.equal ? "equal" : null,
      ...lines,
    ]
      .filter(Boolean)
      .join("<br>");
  }

  return { render, METRICS, rowsOf, hover, weight, placeHash };
})();
