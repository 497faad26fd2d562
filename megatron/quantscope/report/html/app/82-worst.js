"use strict";

/* The tensors that differ most from the baseline's, as a table with links. */

Report.worst = (() => {
  const { h, fill, empty } = Report.dom;
  const { isNumber } = Report.numbers;
  const WORST = 40;

  function draw(root, rows, choice) {
    const { metric } = choice;
    const ranked = rows
      .filter((row) => !row.equal)
      .sort((a, b) => Report.compare.weight(b.value, metric) - Report.compare.weight(a.value, metric))
      .slice(0, WORST);
    if (!ranked.length) return void fill(root, empty("Every compared tensor is equal to the baseline's."));
    const known = Report.data.axes.types.includes(choice.run);
    const line = (row) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, known ? h("a", { href: Report.compare.placeHash(row, choice) }, row.site) : row.site),
        h("td", { class: "number" }, row.layer < 0 ? "–" : row.layer),
        h("td", {}, row.operation),
        Report.compare.METRICS.map(({ id, write, number }) =>
          h("td", { class: "number" }, isNumber(row[id]) && number ? write(number(row[id])) : write(row[id])),
        ),
      );
    const heads = [
      ["site", false],
      ["layer", true],
      ["pass", false],
      ...Report.compare.METRICS.map(({ title }) => [title, true]),
    ];
    fill(
      root,
      h(
        "table",
        { class: "plain" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            heads.map(([title, right]) => h("th", { scope: "col", class: right ? "number" : null }, title)),
          ),
        ),
        h("tbody", {}, ranked.map(line)),
      ),
    );
  }

  return { draw };
})();
