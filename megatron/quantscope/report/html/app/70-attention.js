"use strict";

/* The attention of one layer: a map a head, how spread it is, how much goes to the first token (the sink). */

Report.attention = (() => {
  const { h, fill, one, card, plot, titleLine, empty } = Report.dom;
  let last = null;

  function build(root) {
    fill(
      root,
      titleLine(),
      h("p", { class: "note", "data-role": "note" }),
      h("div", { class: "controls", "data-role": "controls" }),
      h(
        "div",
        { "data-role": "body" },
        headsCard(),
        h("div", { class: "two" }, headCard(), figuresCard()),
        layersCard(),
      ),
    );
  }

  function headsCard() {
    return card(
      "Heads",
      "Where each query (down) looks among the keys (across); brighter is more. Choose a head to read its map.",
      h("div", { class: "heads", "data-role": "heads" }),
      legend(),
    );
  }

  function headCard() {
    const title = h("h2", { "data-role": "head-title" });
    return card(null, null, title, plot("attention-map", "Attention of the chosen head"));
  }

  function figuresCard() {
    return card(
      "By head",
      null,
      plot("attention-sink", "Share of the first token by head"),
      plot("attention-entropy", "Entropy by head"),
      plot("attention-score", "Largest score by head"),
    );
  }

  function layersCard() {
    return card(
      "Share of the first token in every layer",
      "An attention sink takes nearly all of a head's attention. A click opens the layer.",
      plot("attention-layers", "Share of the first token by layer and head", "clickable"),
    );
  }

  function legend() {
    return h(
      "p",
      { class: "keys" },
      h("span", { class: "key" }, "≤ 0.1 %", h("span", { class: "ramp", "aria-hidden": "true" }), "100 %"),
      h("span", { class: "key" }, "attention probability, log scale"),
    );
  }

  const layersOf = (type) =>
    [...new Set(Report.data.attention.filter((entry) => entry.type === type).map((entry) => entry.layer))].sort(
      (a, b) => a - b,
    );

  function choiceOf({ parts, params }) {
    const types = [...new Set((Report.data.attention ?? []).map((entry) => entry.type))];
    const type = Report.controls.chosen(parts[0] ?? params.type, types);
    const layers = type === undefined ? [] : layersOf(type);
    const layer = Report.controls.chosen(parts[1], layers);
    return { types, type, layers, layer, head: params.head };
  }

  function lastHash() {
    return last ?? Report.router.hashOf("attention", [], Report.router.carried());
  }

  function render(root, state) {
    if (!root.firstChild) build(root);
    const choice = choiceOf(state);
    const entry = Report.data.attentionByPlace.get(Report.data.keyOf(choice.type, choice.layer));
    one("[data-role=body]", root).hidden = !entry;
    if (!entry) {
      fill(one("[data-role=title]", root), "Attention");
      return void fill(
        one("[data-role=note]", root),
        empty("The capture has neither attention probabilities nor the queries and keys that they follow from."),
      );
    }
    if (state.parts.length) last = window.location.hash;
    fill(
      one("[data-role=title]", root),
      `Attention · layer ${entry.layer} · `,
      Report.dom.swatch(Report.data.runByType.get(entry.type)?.color ?? "var(--muted)"),
      ` ${Report.controls.runTitle(entry.type)} run`,
    );
    fill(one("[data-role=note]", root), [
      entry.recomputed ? "Recomputed from the captured queries and keys." : "From the captured probabilities.",
      entry.where ? ` ${entry.where.charAt(0).toUpperCase()}${entry.where.slice(1)}.` : "",
      entry.maps.length < entry.heads
        ? ` ${entry.maps.length} of ${entry.heads} heads have maps: those with the least entropy.`
        : "",
    ]);
    fill(one("[data-role=steps]", root), steps(choice));
    Report.controls.bar(one("[data-role=controls]", root), specs(choice, entry));
    const shown = headOf(choice, entry);
    Report.heads.draw(root, entry, shown);
    if (shown) Report.heads.map(root, shown, entry);
    Report.sinks.bars(root, entry);
    return Report.sinks.layers(root, choice);
  }

  function specs({ types, type, layers, layer }, entry) {
    const { options, runTitle } = Report.controls;
    return [
      {
        id: "type",
        label: "Run",
        options: options(types, runTitle),
        value: type,
        change: (value) => changePath(value, layer),
      },
      {
        id: "layer",
        label: "Layer",
        options: options(layers),
        value: layer,
        always: true,
        change: (value) => changePath(type, value),
      },
      {
        id: "head",
        label: "Head",
        options: options(entry.maps.map((tile) => tile.head)),
        value: headOf({ head: Report.router.state().params.head }, entry)?.head,
      },
    ];
  }

  const headOf = ({ head }, entry) => entry.maps.find((tile) => String(tile.head) === head) ?? entry.maps[0];

  function changePath(type, layer) {
    Report.router.go(Report.router.hashOf("attention", [type, String(layer)], Report.router.state().params));
  }

  function steps({ type, layers, layer }) {
    return [
      [-1, "← layer", "previous-layer"],
      [1, "layer →", "next-layer"],
    ].map(([step, text, name]) => {
      const next = layers[layers.indexOf(layer) + step];
      if (next === undefined) return h("span", { class: "step off", "aria-disabled": "true" }, text);
      return h(
        "a",
        {
          class: "step",
          href: Report.router.hashOf("attention", [type, String(next)], Report.router.state().params),
          "data-action": name,
        },
        text,
      );
    });
  }

  /* keys: left and right change the layer. */
  function move(down, right) {
    const { type, layers, layer } = choiceOf(Report.router.state());
    const next = layers[layers.indexOf(layer) + (right || down)];
    if (next !== undefined)
      Report.router.go(Report.router.hashOf("attention", [type, String(next)], Report.router.state().params));
  }

  return { render, lastHash, move, choiceOf };
})();
