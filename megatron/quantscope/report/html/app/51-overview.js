"use strict";

/* The first page: what was found, whether the runs train, where it hurts, and what each format costs. */

Report.overview = (() => {
  const { h, fill, card, plot, one } = Report.dom;

  function build(root) {
    fill(
      root,
      h(
        "section",
        { class: "block", "aria-labelledby": "found" },
        h("h2", { id: "found" }, "Findings"),
        h("div", { "data-role": "findings" }),
      ),
      card("Loss", null, h("div", { "data-role": "losses" })),
      h("div", { class: "controls", "data-role": "controls" }),
      h(
        "div",
        { class: "two" },
        mapCard("amax", "Largest magnitude by site and layer"),
        mapCard("sqnr", "SQNR by site and layer"),
      ),
      h(
        "article",
        { class: "card" },
        h("h2", {}, "What each format costs"),
        h("p", { class: "note", "data-role": "formats-note" }),
        plot("formats", "SQNR of the GEMM operands by format", "clickable"),
      ),
    );
    Report.findings.draw(one("[data-role=findings]", root));
    problems(root);
  }

  function mapCard(name, label) {
    return h(
      "article",
      { class: "card" },
      h(
        "div",
        { class: "card-line" },
        h("h2", { "data-role": `${name}-title` }),
        h("a", { class: "whole", "data-role": `${name}-link` }, "Open the heatmap →"),
      ),
      h("p", { class: "note", "data-role": `${name}-note` }),
      plot(`overview-${name}`, label, "clickable"),
      h("p", { class: "keys", "data-role": `${name}-keys` }),
    );
  }

  /* What could not be read must not go unseen. */
  function problems(root) {
    const { problems: list = [] } = Report.data;
    if (!list.length) return;
    const lines = h(
      "ul",
      {},
      list.map((text) => h("li", {}, text)),
    );
    root.prepend(
      h(
        "details",
        { class: "problems" },
        h(
          "summary",
          {},
          Report.dom.icon("warning"),
          `${list.length} ${list.length === 1 ? "thing" : "things"} could not be read`,
        ),
        lines,
      ),
    );
  }

  function render(root, { params }) {
    if (!root.firstChild) build(root);
    const choice = { ...Report.controls.place(params), ...Report.controls.treatment(params) };
    Report.controls.bar(one("[data-role=controls]", root), [
      ...Report.controls.placeSpecs(choice),
      ...Report.controls.treatmentSpecs(choice),
    ]);
    Report.losses.draw(one("[data-role=losses]", root));
    const height = Report.grid.heightOf(Report.heat.sitesOf("all").length, true);
    small(root, "amax", { ...choice, metric: "amax", tensor: "all" }, "How large the values are", height);
    const rule = choice.rules.length > 1 ? ` (${choice.rule})` : "";
    const treatment = `${Report.controls.formatTitle(choice.format)}${rule}${choice.gemm === 2 ? ", second GEMM," : ""}`;
    small(
      root,
      "sqnr",
      { ...choice, metric: "sqnr", tensor: "operands", colors: "own" },
      choice.format ? `How well ${treatment} holds them` : "How well a format holds them",
      height,
    );
    Report.costs.draw(root, choice);
  }

  function small(root, name, choice, title, height) {
    const role = (part) => one(`[data-role=${name}-${part}]`, root);
    const node = one(`[data-plot=overview-${name}]`, root);
    role("title").textContent = title;
    role("link").hidden = !Report.data.metricById.has(choice.metric);
    if (role("link").hidden) return fill(role("note"), "The capture has no such figures.");
    const view = Report.heat.view(choice, { brief: true });
    const marked = Report.heat.extreme(view);
    const href = Report.router.hashOf("heatmap", [], {
      ...Report.router.carried(),
      metric: choice.metric,
      type: choice.type,
      tensor: choice.tensor,
    });
    role("link").href = href;
    fill(role("note"), note(choice, view, marked));
    Report.grid.legend(role("keys"), view);
    return Report.grid.draw(node, { ...view, compact: true, marked, height }).then(() => {
      Report.plots.onClick(node, (point) => openCell(view, point));
    });
  }

  function note({ type }, { metric }, marked) {
    const run = `${metric.title} in the ${Report.controls.runTitle(type)} run.`;
    if (!marked) return run;
    const word = metric.worse === "low" ? "Lowest" : "Largest";
    return [
      run,
      ` ${word}: `,
      h(
        "a",
        {
          href: Report.router.tensorHash({
            ...Report.controls.place(Report.router.state().params),
            ...marked,
            text: null,
          }),
        },
        marked.long,
      ),
      ".",
    ];
  }

  function openCell({ rows, columns }, { x, y }) {
    const place = Report.controls.place(Report.router.state().params);
    Report.router.go(Report.router.tensorHash({ ...place, site: rows[y], layer: columns[x] }));
  }

  return { render };
})();
