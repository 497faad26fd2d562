"use strict";

/* The map of everything: one metric of one run by site and layer; arrows move, Enter or a click opens the tensor. */

Report.heatmap = (() => {
  const { h, fill, plot, one, empty, say } = Report.dom;
  let current = null; // the view on show, for the keys

  function build(root) {
    fill(
      root,
      h("div", { class: "controls", "data-role": "controls" }),
      h(
        "article",
        { class: "card" },
        h("h2", { "data-role": "title" }),
        h("p", { class: "note", "data-role": "note" }),
        plot("heatmap", "Heatmap of sites by layers: arrow keys move, Enter opens", "clickable"),
        h("p", { class: "keys", "data-role": "keys" }),
      ),
      h("p", { class: "readout", "data-role": "readout" }),
    );
    one("[data-plot=heatmap]", root).tabIndex = 0;
  }

  /* Metrics that have values in this capture. */
  function metrics() {
    const names = Object.keys(Report.data.cells.values);
    return Report.data.metrics.filter((metric) =>
      names.some((name) => name === metric.id || name.startsWith(`${metric.id}/`)),
    );
  }

  function choiceOf(params) {
    const ids = metrics().map((metric) => metric.id);
    const tensors = Report.heat.tensorOptions().map(([value]) => value);
    return {
      ...Report.controls.place(params),
      ...Report.controls.treatment(params),
      metric: Report.controls.chosen(params.metric, ids, ids.includes("sqnr") ? "sqnr" : ids[0]),
      tensor: Report.controls.chosen(params.tensor ?? params.family, tensors),
      versus: params.versus === "baseline" ? "baseline" : "",
      colors: params.colors === "all" ? "all" : "own",
    };
  }

  function render(root, { params }) {
    if (!root.firstChild) build(root);
    const choice = choiceOf(params);
    const metric = Report.data.metricById.get(choice.metric);
    Report.controls.bar(one("[data-role=controls]", root), specs(choice, metric));
    const view = Report.heat.view(choice);
    const node = one("[data-plot=heatmap]", root);
    fill(one("[data-role=title]", root), titleOf(choice, metric, view));
    if (!view.numbers.some((value) => value !== null)) return nothing(root, node, choice);
    const marked = Report.heat.extreme(view);
    current = { view, choice, selected: selectedIn(view, params) ?? null };
    fill(one("[data-role=note]", root), `${metric.help} `, marked ? noteOf(view, marked, choice) : null);
    Report.grid.legend(one("[data-role=keys]", root), view);
    readout(root);
    return Report.grid.draw(node, { ...view, marked, selected: current.selected }).then(() => {
      Report.plots.onClick(node, (point) =>
        open({ site: current.view.rows[point.y], layer: current.view.columns[point.x] }),
      );
    });
  }

  function specs(choice, metric) {
    const { options, placeSpecs, treatmentSpecs } = Report.controls;
    const compares = Report.data.axes.types.length > 1 && choice.type !== Report.data.baseline;
    const baseline = Report.controls.runTitle(Report.data.baseline);
    return [
      {
        id: "metric",
        label: "Metric",
        options: metrics().map((entry) => [entry.id, entry.title]),
        value: choice.metric,
        always: true,
        help: metric.help,
      },
      ...treatmentSpecs(choice, !metric.per_format),
      ...placeSpecs(choice),
      {
        id: "family",
        param: "tensor",
        label: "Tensors",
        options: Report.heat.tensorOptions(),
        value: choice.tensor,
        always: true,
      },
      {
        id: "versus",
        label: "Show",
        options:
          Report.data.axes.types.length > 1
            ? [
                ["", "values"],
                ["baseline", `change against ${baseline}`],
              ]
            : options([""]),
        value: choice.versus,
        disabled: !compares,
      },
      {
        id: "colors",
        label: "Colour range",
        options: [
          ["own", "of this map"],
          ["all", "one for all choices"],
        ],
        value: choice.colors,
        always: true,
      },
    ];
  }

  function titleOf(choice, metric, view) {
    const treated = metric.per_format ? ` under ${Report.controls.formatTitle(choice.format)}` : "";
    const rule = metric.per_format && choice.rules.length > 1 ? ` (${choice.rule})` : "";
    const gemm = metric.per_format && choice.gemm === 2 ? ", second GEMM" : "";
    const against = view.compared ? `, change against ${Report.controls.runTitle(Report.data.baseline)}` : "";
    return `${metric.title}${treated}${rule}${gemm}: ${Report.controls.runTitle(choice.type)} run${against}`;
  }

  function noteOf(view, marked, choice) {
    const word = view.compared ? "Changed most: " : view.metric.worse === "low" ? "Lowest: " : "Highest: ";
    return [
      word,
      h(
        "a",
        {
          href: Report.router.tensorHash({ ...choice, site: marked.site, layer: marked.layer }),
          "data-action": "open-extreme",
        },
        marked.long,
      ),
      ".",
    ];
  }

  function nothing(root, node, choice) {
    current = null;
    Report.plots.clear(node);
    fill(one("[data-role=keys]", root));
    fill(one("[data-role=readout]", root));
    const second = choice.gemm === 2 && !Report.controls.hasSecond(choice);
    fill(
      one("[data-role=note]", root),
      empty(
        second
          ? "This format has no blocks, so both GEMMs have one figure: choose the first."
          : "The capture has no such figures for this choice.",
      ),
    );
  }

  function selectedIn({ rows, columns }, params) {
    const place = { site: params.site, layer: Number(params.layer) };
    return rows.includes(place.site) && columns.includes(place.layer) && params.layer !== undefined ? place : null;
  }

  function readout(root) {
    const node = one("[data-role=readout]", root);
    if (!current.selected) return void fill(node, "Arrow keys move over the cells, Enter or a click opens one.");
    const { site, layer } = current.selected;
    const value = current.view.valueAt(site, layer);
    const { metric, compared, unit } = current.view;
    const written = compared ? `change ${Report.numbers.signed(value)} ${unit}` : Report.numbers.ofMetric(metric, value);
    const text = `${Report.grid.describe(current.selected)}: ${metric.title} ${written}`;
    say(text);
    return void fill(
      node,
      text,
      " ",
      h("a", { href: Report.router.tensorHash({ ...current.choice, site, layer }) }, "Open →"),
    );
  }

  function open({ site, layer }) {
    if (Report.data.cellAt({ ...current.choice, site, layer }) === null) return;
    Report.router.go(Report.router.tensorHash({ ...current.choice, site, layer }));
  }

  /* keys: down and right count up. */
  function move(down, right) {
    if (!current) return;
    const { rows, columns } = current.view;
    const [row, column] = current.selected
      ? [rows.indexOf(current.selected.site) + down, columns.indexOf(current.selected.layer) + right]
      : [0, 0];
    const site = rows[Math.min(rows.length - 1, Math.max(0, row))];
    const layer = columns[Math.min(columns.length - 1, Math.max(0, column))];
    Report.router.set({ site, layer }, { replace: true });
  }

  function enter() {
    if (current?.selected) open(current.selected);
  }

  return { render, move, enter };
})();
