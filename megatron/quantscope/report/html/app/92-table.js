"use strict";

/* Every cell as a row: sorted by a click on a column, filtered by words, and only the rows in sight are elements. */

Report.table = (() => {
  const { h, fill, one, say } = Report.dom;
  const ROW = 28; // pixels, as in the style sheet
  const BEYOND = 12; // rows drawn above and below what is in sight
  const DELAY = 180; // ms after the last key before the filter runs
  const SAMPLE = 200; // rows that column widths are measured by
  const self = { rows: [], columns: [], body: null };
  let timer = 0;
  let frame = 0;

  function build(root) {
    const filter = h("input", {
      type: "search",
      "data-control": "filter",
      spellcheck: "false",
      autocomplete: "off",
      placeholder: "fc2 sqnr_mxfp4<15 layer=11",
      "aria-label": "Filter rows",
      "aria-describedby": "filter-help",
      input: typed,
    });
    fill(
      root,
      h(
        "div",
        { class: "controls" },
        h("label", { class: "control wide" }, h("span", {}, "Filter"), filter),
        h("div", { class: "controls inner", "data-role": "controls" }),
        h("button", { type: "button", "data-action": "csv", click: download }, "Download CSV"),
      ),
      h(
        "p",
        { class: "note", id: "filter-help" },
        h("span", { "data-role": "count" }),
        " Words must occur in run, site or family; comparisons are ",
        h("code", {}, "column<number"),
        " with < > <= >= = !=. The CSV has every column of these rows, numbers to six digits.",
        h("span", { class: "problem", "data-role": "filter-problem", role: "alert" }),
      ),
      h(
        "div",
        { class: "scroll rows", "data-role": "rows", tabindex: 0, scroll: scrolled },
        h("table", { "data-table": true }, h("colgroup"), h("thead"), h("tbody")),
      ),
    );
    new ResizeObserver(scrolled).observe(one("[data-role=rows]", root));
  }

  function typed(event) {
    clearTimeout(timer);
    const { value } = event.target;
    timer = setTimeout(() => Report.router.set({ filter: value }, { replace: true }), DELAY);
  }

  function render(root, { params }) {
    if (!root.firstChild) build(root);
    const input = one("[data-control=filter]", root);
    if (document.activeElement !== input) input.value = params.filter ?? "";
    const groups = Report.columns.groups();
    const group = Report.controls.chosen(
      params.columns,
      groups.map(([id]) => id),
    );
    Report.controls.bar(one("[data-role=controls]", root), [
      { id: "columns", label: "Columns", options: groups, value: group, always: true },
    ]);
    self.columns = Report.columns.shown(group);
    const { tests, problem } = Report.filter.compiled(params.filter ?? "");
    one("[data-role=filter-problem]", root).textContent = problem ? ` ${problem}` : "";
    self.rows = picked(tests);
    sort(params);
    head(root, params);
    self.body = one("tbody", root);
    one("[data-role=rows]", root).scrollTop = 0;
    body();
    const text = `${self.rows.length.toLocaleString("en-US")} of ${Report.data.count.toLocaleString("en-US")} rows.`;
    one("[data-role=count]", root).textContent = text;
    say(text);
  }

  function picked(tests) {
    const rows = [];
    for (let cell = 0; cell < Report.data.count; cell += 1) if (tests.every((test) => test(cell))) rows.push(cell);
    return rows;
  }

  /* Rows without a value come last, whichever the direction. */
  function sort({ sort: id, order }) {
    const column = Report.columns.list().find((entry) => entry.id === id);
    if (!column) return;
    const sign = order === "down" ? -1 : 1;
    const keys = new Map(self.rows.map((cell) => [cell, Report.columns.order(column.value(cell))]));
    const compare = column.numeric
      ? (a, b) => a - b
      : (a, b) => String(a).localeCompare(String(b), "en", { numeric: true });
    self.rows.sort((left, right) => {
      const [a, b] = [keys.get(left), keys.get(right)];
      if (a === b) return left - right;
      if (a === null || b === null) return a === null ? 1 : -1;
      return sign * compare(a, b) || left - right;
    });
  }

  function head(root, { sort: sorted, order }) {
    const directions = { up: "ascending", down: "descending" };
    const heads = self.columns.map((column) => {
      const direction = column.id === sorted ? (order === "down" ? "down" : "up") : null;
      const button = h(
        "button",
        { type: "button", title: column.help ?? column.title, click: () => toggle(column, direction) },
        column.title,
        column.treatment ? h("span", { class: "treatment" }, column.treatment) : null,
        direction ? h("span", { class: "arrow", "aria-hidden": "true" }, { up: " ▲", down: " ▼" }[direction]) : null,
      );
      return h(
        "th",
        {
          scope: "col",
          class: column.numeric ? "number" : null,
          "data-column": column.id,
          "aria-sort": directions[direction] ?? "none",
        },
        button,
      );
    });
    const focused = document.activeElement?.closest?.("[data-column]")?.dataset.column;
    fill(one("thead", root), h("tr", {}, heads));
    fill(
      one("colgroup", root),
      widths().map((width) => {
        const column = h("col");
        column.style.width = `${width}ch`;
        return column;
      }),
    );
    one("table", root).style.width = `${widths().reduce((sum, width) => sum + width, 0)}ch`;
    if (focused) heads.find((cell) => cell.dataset.column === focused)?.firstChild.focus();
  }

  /* Numbers sort downwards first, texts upwards. */
  function toggle(column, direction) {
    const first = column.numeric ? "down" : "up";
    const other = first === "down" ? "up" : "down";
    Report.router.set({ sort: column.id, order: direction === first ? other : first }, { replace: true });
  }

  /* Fixed, so that columns do not jump while rows come and go. */
  function widths() {
    const step = Math.max(1, Math.floor(Report.data.count / SAMPLE));
    return self.columns.map((column) => {
      let longest = Math.max(column.title.length, (column.treatment ?? "").length) + 1;
      for (let cell = 0; cell < Report.data.count; cell += step)
        longest = Math.max(longest, column.write(column.value(cell)).length);
      return Math.min(34, longest + 3);
    });
  }

  function scrolled() {
    if (!self.body || frame) return;
    frame = requestAnimationFrame(() => {
      frame = 0;
      body();
    });
  }

  function body() {
    const box = self.body.closest("[data-role=rows]");
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - BEYOND);
    const last = Math.min(self.rows.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + BEYOND);
    const spacer = (rows) => {
      const blank = h("tr", { "aria-hidden": "true", class: "spacer" }, h("td", { colspan: self.columns.length }));
      blank.style.height = `${rows * ROW}px`;
      return blank;
    };
    const rows = self.rows.slice(first, last).map((cell, index) => row(cell, first + index));
    fill(
      self.body,
      first ? spacer(first) : null,
      rows,
      last < self.rows.length ? spacer(self.rows.length - last) : null,
    );
    if (!self.rows.length)
      fill(
        self.body,
        h("tr", {}, h("td", { class: "empty", colspan: self.columns.length }, "No row passes the filter.")),
      );
  }

  function row(cell, index) {
    return h(
      "tr",
      { "data-row": cell, class: index % 2 ? "odd" : null },
      self.columns.map((column) => {
        const text = column.write(column.value(cell));
        const content =
          column.id === "site" ? h("a", { href: Report.router.tensorHash(Report.data.placeOf(cell)) }, text) : text;
        return h("td", { class: column.numeric ? "number" : null }, content);
      }),
    );
  }

  function download() {
    Report.csv.save(self.rows, Report.columns.list(), "quantscope.csv");
  }

  function focus() {
    one("[data-control=filter]").focus();
  }

  return { render, focus };
})();
