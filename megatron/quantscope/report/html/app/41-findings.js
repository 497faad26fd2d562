"use strict";

/* What the analysis found, the worst first: severity by shape, word and colour; the numbers; the way to the figure. */

Report.findings = (() => {
  const { h, fill, icon, empty } = Report.dom;
  const { magnitude } = Report.numbers;
  const WORDS = { critical: "Critical", warning: "Warning", note: "Note" };
  const NAMES = /(channel|token|layer|rank|iteration|head)$/; // numbers that are names, not sizes
  const SHOWN = 9;

  function draw(root) {
    const { findings } = Report.data;
    if (!findings.length) {
      fill(
        root,
        empty(
          Report.data.formats.length
            ? "Nothing stood out: no NaN or Inf, no saturation or underflow beyond the thresholds, no outlier channels."
            : "Nothing stood out. The capture has no tensors to quantise, so saturation and underflow are not known.",
        ),
      );
      return;
    }
    const items = findings.map(card);
    for (const item of items.slice(SHOWN)) item.hidden = true;
    const rest = items.length - SHOWN;
    const list = h("ol", { class: "findings" }, items);
    fill(root, list, rest > 0 ? moreButton(items, rest) : null);
  }

  function moreButton(items, rest) {
    const button = h(
      "button",
      {
        type: "button",
        "data-action": "more-findings",
        click: () => {
          for (const item of items) item.hidden = false;
          items[SHOWN].focus();
          button.remove();
        },
      },
      `Show ${rest} more`,
    );
    return button;
  }

  function card(finding) {
    const word = WORDS[finding.severity] ?? "Note";
    return h(
      "li",
      {
        class: `finding ${finding.severity in WORDS ? finding.severity : "note"}`,
        "data-finding": finding.kind,
        tabindex: -1,
      },
      h(
        "p",
        { class: "severity" },
        icon(finding.severity),
        word,
        h("span", { class: "kind" }, String(finding.kind).replaceAll("_", " ")),
      ),
      h("h3", {}, finding.title),
      h("p", { class: "finding-text" }, finding.text),
      numbersLine(finding.numbers),
      h("p", { class: "place" }, placeText(finding), showLink(finding)),
    );
  }

  function numbersLine(numbers) {
    const pairs = Object.entries(numbers ?? {});
    if (!pairs.length) return null;
    return h(
      "dl",
      { class: "numbers" },
      pairs.map(([name, value]) => {
        return h(
          "div",
          {},
          h("dt", {}, name.replaceAll("_", " ")),
          h("dd", {}, typeof value === "number" && !NAMES.test(name) ? magnitude(value) : String(value)),
        );
      }),
    );
  }

  function placeText({ type, site, layer, rank, iteration }) {
    const has = (value) => value !== null && value !== undefined;
    const parts = [
      has(type) ? Report.controls.runTitle(type) : null,
      site,
      has(layer) ? Report.numbers.layer(layer) : null,
      has(iteration) && Report.data.axes.iterations.length > 1 ? `iteration ${iteration}` : null,
      has(rank) && Report.data.axes.ranks.length > 1 ? `rank ${rank}` : null,
    ];
    return h("span", {}, parts.filter(has).join(" · "));
  }

  /* Only links into this page; whatever else stands there is not followed. */
  function showLink(finding) {
    if (typeof finding.link !== "string" || !finding.link.startsWith("#/")) return null;
    return h(
      "a",
      { href: finding.link, "data-action": "show", "aria-label": `Show: ${finding.title}` },
      "Show ",
      h("span", { "aria-hidden": "true" }, "→"),
    );
  }

  return { draw };
})();
