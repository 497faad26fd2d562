"use strict";

/* What was run: a chip a run, its details on demand; the pages; how this report was made. */

Report.header = (() => {
  const { h, fill, add, one, swatch } = Report.dom;
  const { count, bytes } = Report.numbers;
  const TABS = {
    overview: "Overview",
    heatmap: "Heatmap",
    tensor: "Tensor",
    attention: "Attention",
    compare: "Compare",
    table: "Table",
  };

  const dated = (iso) =>
    String(iso ?? "")
      .slice(0, 16)
      .replace("T", " ");

  function draw() {
    fill(one("[data-role=runs]"), Report.data.runs.map(runChip));
    fill(one("[data-role=foot]"), footLines());
  }

  function runChip(run) {
    const panel = h("div", { class: "run-panel" }, facts(run));
    const baseline = run.type === Report.data.baseline && Report.data.runs.length > 1;
    return h(
      "details",
      { class: "run", "data-run": run.type, name: "run" },
      h(
        "summary",
        { title: "Show what this run was" },
        swatch(run.color),
        run.title,
        baseline ? h("span", { class: "tag" }, "baseline") : null,
      ),
      panel,
    );
  }

  function facts(run) {
    const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
    const extent = [plural(run.iterations, "iteration"), plural(run.ranks, "rank")].join(", ");
    const losses = (run.losses ?? [])
      .slice(-1)
      .map(([iteration, loss]) => `${Number(loss).toFixed(4)} (iteration ${iteration})`);
    const lines = [
      ["Run", run.run_id ?? "files without a run record"],
      ["Made", dated(run.created)],
      [
        "Captured",
        `${count(run.rows)} tensors in ${count(run.files)} files, ${bytes(run.bytes)}, ${count(run.elements)} elements`,
      ],
      ["Extent", extent],
      ["Loss", losses[0]],
      ["Model", entries(run.model)],
      ["Versions", entries(run.versions)],
      ["Command", run.command ? h("code", {}, run.command.join(" ")) : null],
    ];
    return h(
      "dl",
      {},
      lines.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    );
  }

  function entries(record) {
    const pairs = Object.entries(record ?? {});
    return pairs.length
      ? pairs.map(([name, value]) => h("span", { class: "pair" }, `${name} `, h("b", {}, String(value))))
      : null;
  }

  function footLines() {
    const { source, generated, quantscope, command, merged, selection } = Report.data;
    return [
      h(
        "p",
        {},
        [`Read from ${source}`, selection, `made ${dated(generated)} by quantscope ${quantscope ?? ""}`]
          .filter(Boolean)
          .join(" · "),
      ),
      command?.length ? h("p", {}, h("code", {}, command.join(" "))) : null,
      merged ? h("p", {}, merged) : null,
    ];
  }

  /* The tabs take the run, format and place along; a tensor's tab leads to the one last seen or the most extreme. */
  function tabs(view) {
    const targets = {
      tensor: Report.tensor.lastHash(),
      attention: Report.attention.lastHash(),
    };
    const strip = one("[data-role=tabs]");
    if (!strip.firstChild)
      add(
        strip,
        Report.router.VIEWS.map((name) => h("a", { "data-nav": name }, TABS[name])),
      );
    for (const link of strip.children) {
      const name = link.dataset.nav;
      link.href = targets[name] ?? Report.router.hashOf(name, [], Report.router.carried());
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    one("[aria-current]", strip)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  return { draw, tabs };
})();
