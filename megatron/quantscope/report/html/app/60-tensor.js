"use strict";

/* All about one tensor: facts, exponents against a format's range, block scales, channels, what every format would do. */

Report.tensor = (() => {
  const { h, fill, one, plot, titleLine, empty } = Report.dom;
  const { layer: layerText } = Report.numbers;
  let last = null; // hash of the tensor shown last, where the tab leads

  function build(root) {
    fill(
      root,
      titleLine(),
      h("dl", { class: "facts", "data-role": "facts" }),
      h("div", { class: "controls", "data-role": "controls" }),
      part("exponents", "Exponents", [
        plot("exponents", "Histogram of the exponents, with the format's range"),
        h("p", { class: "keys", "data-role": "exponents-keys" }),
      ]),
      part(
        "what-if",
        "What each format would do",
        h("div", { class: "scroll", "data-role": "what-if", tabindex: 0, "aria-label": "What each format would do" }),
      ),
      h(
        "div",
        { class: "two" },
        part("channels", "Largest magnitude by channel", plot("channels", "Largest magnitude of each channel")),
        part("surface", "Tokens and channels", plot("surface", "Magnitudes by token and channel")),
      ),
      part(
        "quantiles",
        "Against a normal distribution",
        plot("quantiles", "Quantiles against those of a normal distribution"),
      ),
      part("scales", "Block scales", h("div", { class: "pair-of-plots", "data-role": "scales" })),
      part("blocks", "SQNR by block", h("div", { class: "pair-of-plots", "data-role": "blocks" })),
      part("siblings", "The same tensor in every run", h("div", { class: "siblings", "data-role": "siblings" })),
    );
  }

  /* A card with a note that its module fills. */
  function part(name, title, body) {
    return h(
      "article",
      { class: "card", "data-part": name },
      h("h2", {}, title),
      h("p", { class: "note", "data-role": `${name}-note` }),
      body,
    );
  }

  /* #/tensor/TYPE/SITE/LAYER; what is missing or unknown is replaced by the run's most extreme tensor. */
  function choiceOf({ parts, params }) {
    const place = Report.controls.place({ ...params, type: parts[0] ?? params.type });
    const wanted = { ...place, type: parts[0] ?? place.type, site: parts[1], layer: Number(parts[2] || NaN) };
    const cell = Report.data.cellAt(wanted);
    if (parts.length) return { ...wanted, cell };
    const found = extreme(place);
    return { ...found, cell: Report.data.cellAt(found) };
  }

  function extreme(place) {
    const metric = Report.data.metricById.has("amax") ? "amax" : Report.data.metrics[0].id;
    const view = Report.heat.view({ ...place, metric, tensor: "all" }, { brief: true });
    const marked = Report.heat.extreme(view) ?? { site: view.rows[0], layer: view.columns.at(-1) };
    return { ...place, site: marked.site, layer: marked.layer };
  }

  function lastHash() {
    return last ?? Report.router.hashOf("tensor", [], Report.router.carried());
  }

  function render(root, state) {
    if (!root.firstChild) build(root);
    const choice = choiceOf(state);
    const detail = Report.data.detail(choice.cell);
    const missing = choice.cell === null;
    for (const part of root.children) part.hidden = missing && !part.contains(one("[data-role=title]", root));
    fill(one("[data-role=title]", root), missing ? "Not captured" : heading(choice));
    if (missing)
      return void fill(
        one("[data-role=steps]", root),
        empty(`This capture has no ${namesOf(choice)} here. `),
        h("a", { href: Report.router.hashOf("heatmap") }, "Choose one in the heatmap"),
      );
    last = window.location.hash;
    const treated = { ...choice, ...Report.controls.treatment(state.params), detail, params: state.params };
    fill(one("[data-role=steps]", root), steps(choice));
    fill(one("[data-role=facts]", root), Report.facts.of(treated));
    Report.controls.bar(one("[data-role=controls]", root), specs(treated));
    Report.exponents.draw(root, treated);
    Report.whatIf.draw(root, treated);
    Report.channels.draw(root, treated);
    Report.blocks.draw(root, treated);
    Report.quantiles.draw(root, treated);
    Report.siblings.draw(root, treated);
  }

  /* A link may name less than a tensor, or a layer that is no number. */
  function namesOf({ type, site, layer }) {
    const layers = Number.isInteger(layer) ? layerText(layer) : null;
    return `${[site ?? "tensor", layers].filter(Boolean).join(", ")} of the run ${type}`;
  }

  function heading({ type, site, layer }) {
    const run = Report.data.runByType.get(type);
    return [
      h("span", { class: "site" }, site),
      ` · ${layerText(layer)} · `,
      Report.dom.swatch(run?.color ?? "var(--muted)"),
      ` ${Report.controls.runTitle(type)} run`,
    ];
  }

  /* The nearest layers below and above, and sites before and after, where this tensor is there too. */
  function neighbour(choice, field, step) {
    const list = field === "layer" ? Report.data.layersWithOutside() : Report.data.axes.sites;
    for (let index = list.indexOf(choice[field]) + step; index >= 0 && index < list.length; index += step) {
      const place = { ...choice, [field]: list[index] };
      if (Report.data.cellAt(place) !== null) return place;
    }
    return null;
  }

  function steps(choice) {
    const link = (field, step, text, name) => {
      const place = neighbour(choice, field, step);
      if (!place) return h("span", { class: "step off", "aria-disabled": "true" }, text);
      return h(
        "a",
        { class: "step", href: hashFor(place), "data-action": name, rel: step < 0 ? "prev" : "next" },
        text,
      );
    };
    const attention = Report.data.attentionByPlace.get(Report.data.keyOf(choice.type, choice.layer));
    return [
      link("layer", -1, "← layer", "previous-layer"),
      link("layer", 1, "layer →", "next-layer"),
      link("site", -1, "↑ site", "previous-site"),
      link("site", 1, "site ↓", "next-site"),
      attention
        ? h(
            "a",
            {
              class: "step",
              href: Report.router.hashOf("attention", [choice.type, String(choice.layer)]),
              "data-action": "attention",
            },
            "Attention of the layer",
          )
        : null,
    ];
  }

  function hashFor(place) {
    const { params } = Report.router.state();
    return Report.router.hashOf("tensor", [place.type, place.site, String(place.layer)], {
      ...params,
      type: null,
      iteration: place.iteration,
      rank: place.rank,
    });
  }

  function specs(choice) {
    const { options, placeSpecs, treatmentSpecs } = Report.controls;
    const { type, iteration, rank } = choice;
    const [typeSpec, ...places] = placeSpecs({ type, iteration, rank });
    const { axes } = Report.data;
    const layers = Report.data.layersWithOutside();
    const jump = (place) => Report.router.go(hashFor({ ...choice, ...place }));
    return [
      { id: "site", label: "Site", options: options(axes.sites), value: choice.site, change: (site) => jump({ site }) },
      {
        id: "layer",
        label: "Layer",
        options: options(layers, (layer) => (layer < 0 ? "outside" : String(layer))),
        value: choice.layer,
        change: (layer) => jump({ layer }),
      },
      { ...typeSpec, always: false, change: (type) => jump({ type }) },
      ...places,
      ...treatmentSpecs(choice),
      ...figureSpecs(choice),
    ];
  }

  function figureSpecs({ params, format, cell }) {
    const spec = (id, param, label, options, disabled = false) => {
      const value = Report.controls.chosen(
        params[param],
        options.map(([name]) => name),
      );
      return { id, param, label, options, value, disabled };
    };
    const blocks = [
      ["median", "the median scale"],
      ["smallest", "the smallest scale"],
      ["largest", "the largest scale"],
    ];
    const surfaces = [
      ["3d", "3-D surface"],
      ["flat", "flat map"],
    ];
    const scaled = Report.data.formatByName.get(format)?.scale === "e8m0";
    return [
      spec("blocks", "blocks", "Range of the block with", blocks, !scaled),
      spec("channel-scale", "channels", "Channels", Report.controls.options(["linear", "log"])),
      spec("surface", "surface", "Surface", surfaces, !Report.data.surfaceByCell.has(cell)),
    ];
  }

  /* keys: arrows go to the neighbours. */
  function move(down, right) {
    const choice = choiceOf(Report.router.state());
    const place = neighbour(choice, right ? "layer" : "site", right || down);
    if (place) Report.router.go(hashFor(place));
  }

  return { render, lastHash, move };
})();
