"use strict";

/* The keyboard, and the page that explains it. Keys that are being typed into a field are the field's. */

Report.keys = (() => {
  const { h, fill, one } = Report.dom;
  const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const FIELDS = "input, select, textarea, dialog";
  const SCROLLING = "summary, [data-role=rows], .scroll"; // where arrows and Enter have a meaning of their own
  const KEYS = [
    ["← ↑ → ↓", "heatmap: move over the cells; tensor: previous or next layer and site"],
    ["Enter", "heatmap: open the tensor of the cell"],
    ["Esc", "back to where you came from"],
    ["1 … 6", "the pages"],
    ["/", "the table's filter"],
    ["?", "this help"],
  ];
  const WORDS = [
    [
      "site",
      "a module and one of its tensors: fc2.y is the output of the second linear layer of the MLP; x input, w weight, dy gradient of the output, dx and dw the gradients that follow",
    ],
    [
      "operand",
      "a tensor that goes into a matrix product, the one that a format is applied to; first and second GEMM are the two products it goes into, which sum along different axes",
    ],
    ["SQNR", "signal to quantisation noise ratio in dB: 6 dB more are one bit more"],
    ["underflow, saturation", "values other than zero that become zero; values clipped to the largest"],
    [
      "scale rule",
      "how the power of two that a block shares follows from its largest value: floor, or rceil, which never saturates",
    ],
    ["dead block", "a block with values other than zero that all become zero"],
  ];

  function build() {
    const list = (pairs, tag) =>
      h(
        "dl",
        {},
        pairs.map(([name, text]) => [h("dt", {}, h(tag, {}, name)), h("dd", {}, text)]),
      );
    fill(
      one("[data-role=help]"),
      h(
        "form",
        { method: "dialog" },
        h("h2", {}, "Keys"),
        list(KEYS, "kbd"),
        h("h2", {}, "Words"),
        list(WORDS, "b"),
        h("p", { class: "right" }, h("button", { "data-action": "close-help" }, "Close")),
      ),
    );
  }

  function help() {
    const dialog = one("[data-role=help]");
    if (!dialog.open) dialog.showModal();
  }

  const MOVERS = { heatmap: () => Report.heatmap, tensor: () => Report.tensor, attention: () => Report.attention };

  function pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || one("[data-role=help]").open) return;
    const { view } = Report.router.state();
    if (event.key === "Escape") return escape(event, view);
    if (event.target.closest?.(FIELDS)) return;
    const own = event.target.closest?.(SCROLLING);
    const actions = {
      "/": () => filter(view),
      "?": help,
      Enter: view === "heatmap" && !own && !event.target.closest?.("a, button") ? Report.heatmap.enter : null,
    };
    const page = Report.router.VIEWS[Number(event.key) - 1];
    const arrow = own ? null : ARROWS[event.key];
    const action =
      arrow && MOVERS[view]
        ? () => MOVERS[view]().move(...arrow)
        : page
          ? () => one(`[data-nav=${page}]`).click()
          : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  /* Out of a field first; then back, or to the overview where there is no way back. */
  function escape(event, view) {
    const field = event.target.closest?.("input, select");
    if (field) return field.blur();
    if (view === "overview") return;
    if (Report.main.visited() > 1) window.history.back();
    else Report.router.go("#/");
  }

  function filter(view) {
    if (view === "table") return Report.table.focus();
    window.addEventListener("hashchange", Report.table.focus, { once: true }); // after the router's own listener has drawn it
    return Report.router.go(Report.router.hashOf("table"));
  }

  function start() {
    build();
    document.addEventListener("keydown", pressed);
    one("[data-action=help]").addEventListener("click", help);
  }

  return { start };
})();
