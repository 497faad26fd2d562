"use strict";

/* Rows of drop-down lists whose values live in the hash. They are kept, not made anew, so that the focus stays. */

Report.controls = (() => {
  const { h, one } = Report.dom;
  const changes = new WeakMap(); // select -> what else than setting its parameter a change does

  /* specs: [{id, label, options: [[value, text]] , value, disabled, param, change}]; a list of one choice is left out unless
     `always`. */
  function bar(root, specs) {
    for (const spec of specs) {
      const hidden = spec.options.length < 2 && !spec.always;
      const control = one(`[data-control="${spec.id}"]`, root) ?? made(root, spec);
      control.closest("label").hidden = hidden;
      control.disabled = Boolean(spec.disabled);
      update(control, spec);
    }
  }

  function made(root, spec) {
    const select = h("select", { "data-control": spec.id });
    select.addEventListener("change", () => changes.get(select)(select.value));
    root.append(h("label", { class: "control", title: spec.help }, h("span", {}, spec.label), select));
    return select;
  }

  function update(select, spec) {
    changes.set(select, spec.change ?? ((value) => Report.router.set({ [spec.param ?? spec.id]: value })));
    const wanted = JSON.stringify(spec.options);
    if (select.dataset.options !== wanted) {
      select.dataset.options = wanted;
      select.replaceChildren(...spec.options.map(([value, text]) => h("option", { value }, text)));
    }
    select.value = String(spec.value);
  }

  const options = (values, text = String) =>
    values.map((value) => [String(value), value === null ? "all" : text(value)]);

  /* What was asked for if it is among the values, else the fallback: links of older reports must not break. */
  function chosen(asked, values, fallback = values[0]) {
    return values.find((value) => String(value) === asked) ?? fallback;
  }

  const runTitle = (type) => Report.data.runByType.get(type)?.title ?? type;
  const formatTitle = (name) => Report.data.formatByName.get(name)?.title ?? name;

  /* The choices that most pages share, read from the hash with sensible first values. */
  function place(params) {
    const { axes, baseline, runs } = Report.data;
    const types = axes.types;
    return {
      type: chosen(params.type, types, baseline ?? runs[0]?.type ?? types[0]),
      iteration: chosen(params.iteration, axes.iterations, axes.iterations.at(-1)),
      rank: chosen(params.rank, axes.ranks),
    };
  }

  const PREFERRED = ["mxfp4", "mxfp8", "hifp8"];

  function treatment(params) {
    const { formats } = Report.data;
    const names = formats.map((format) => format.name);
    const format = chosen(params.format, names, PREFERRED.find((name) => names.includes(name)) ?? names[0]);
    const rules = Report.data.formatByName.get(format)?.rules ?? [];
    return { format, rule: chosen(params.rule, rules, rules[0] ?? ""), gemm: params.gemm === "2" ? 2 : 1, rules };
  }

  function placeSpecs(now) {
    const { axes } = Report.data;
    return [
      { id: "type", label: "Run", options: options(axes.types, runTitle), value: now.type, always: true },
      { id: "iteration", label: "Iteration", options: options(axes.iterations), value: now.iteration },
      { id: "rank", label: "Rank", options: options(axes.ranks), value: now.rank },
    ];
  }

  function treatmentSpecs(now, disabled = false) {
    const formats = Report.data.formats.map((format) => format.name);
    if (!formats.length) return [];
    const rules = now.rules.length ? options(now.rules) : [["", "none"]];
    const gemms = [
      ["1", "first"],
      ["2", "second"],
    ];
    return [
      {
        id: "format",
        label: "Format",
        options: options(formats, formatTitle),
        value: now.format,
        disabled,
        always: true,
      },
      {
        id: "rule",
        label: "Scale rule",
        options: rules,
        value: now.rule,
        disabled: disabled || now.rules.length < 2,
        always: true,
      },
      { id: "gemm", label: "GEMM", options: gemms, value: now.gemm, disabled: disabled || !hasSecond(now) },
    ];
  }

  /* Formats without blocks do not care along which axis a GEMM sums: they have one figure for both. */
  function hasSecond({ format }) {
    const suffix = `/${format}@2`;
    return Object.keys(Report.data.cells.values).some((name) => name.endsWith(suffix));
  }

  return { bar, options, chosen, place, treatment, placeSpecs, treatmentSpecs, hasSecond, runTitle, formatTitle };
})();
