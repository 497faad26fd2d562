"use strict";

/* The same tensor of every run, side by side on the same axes: what the format of the run itself has done to it. */

Report.siblings = (() => {
  const { h, fill, one, plot, swatch } = Report.dom;
  const { magnitude, percent } = Report.numbers;
  const HEIGHT = 130;

  function draw(root, choice) {
    const part = one("[data-part=siblings]", root);
    const runs = Report.data.axes.types
      .map((type) => ({ type, cell: Report.data.cellAt({ ...choice, type }) }))
      .map((run) => ({ ...run, detail: Report.data.detail(run.cell) }))
      .filter(({ detail }) => detail?.exponents?.counts?.length);
    part.hidden = runs.length < 2;
    if (part.hidden) return;
    const all = runs.map(({ detail }) => detail.exponents);
    const range = [
      Math.min(...all.map(({ first }) => first)) - 0.5,
      Math.max(...all.map(({ first, counts }) => first + counts.length)) + 0.5,
    ];
    const top = Math.max(...all.flatMap(({ counts }) => counts));
    const place = fill(
      one("[data-role=siblings]", root),
      runs.map((run) => figure(run, choice)),
    );
    runs.forEach((run, index) => {
      const node = one("[data-plot]", place.children[index]);
      Report.plots.draw(node, () =>
        Report.exponents.sketch(run.detail.exponents, range, top, Report.plots.runColor(run.type), HEIGHT),
      );
    });
  }

  function figure({ type, cell, detail }, choice) {
    const current = type === choice.type;
    const run = Report.data.runByType.get(type);
    const title = Report.controls.runTitle(type);
    const href = Report.router.hashOf("tensor", [type, choice.site, String(choice.layer)], {
      ...Report.router.state().params,
      type: null,
    });
    const value = (name) => detail[name] ?? Report.data.value(name, cell);
    const lines = [
      ["amax", magnitude(value("amax"))],
      ["rms", magnitude(value("rms"))],
      ["kurtosis", magnitude(value("kurtosis"))],
      ["zeros", percent(value("zero_percent"))],
    ];
    return h(
      "figure",
      { class: current ? "sibling current" : "sibling" },
      h(
        "figcaption",
        {},
        swatch(run?.color ?? "var(--muted)"),
        current ? h("b", {}, title, " (shown)") : h("a", { href, "data-action": "sibling" }, title),
      ),
      plot(`sibling-${type}`, `Exponents in the ${title} run`),
      h(
        "dl",
        { class: "facts small" },
        lines.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))),
      ),
    );
  }

  return { draw };
})();
