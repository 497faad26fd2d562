"use strict";

/* Elements made by hand. Text only ever enters as text nodes, so that names out of files can not become markup. */

Report.dom = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  /* h("a", {class: "chip", href, "data-row": 3, click: listener}, "text", node, null, [more]) */
  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") element.addEventListener(name, value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    return add(element, ...children);
  }

  function add(element, ...children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  function fill(element, ...children) {
    element.replaceChildren();
    return add(element, ...children);
  }

  function one(selector, root = document) {
    return root.querySelector(selector);
  }

  /* Shapes differ as well as colours: a filled octagon, a triangle, a ring. */
  const ICONS = {
    critical: "M5 1h6l4 4v6l-4 4H5l-4-4V5zM7 4v5h2V4zM7 10.5v2h2v-2z",
    warning: "M8 1l7.5 14H.5zM7 6v4.5h2V6zM7 11.5v2h2v-2z",
    note: "M8 1a7 7 0 1 1 0 14A7 7 0 0 1 8 1zm0 1.6a5.4 5.4 0 1 0 0 10.8A5.4 5.4 0 0 0 8 2.6zM7 7v5h2V7zM7 4v2h2V4z",
  };

  function icon(name) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 16 16");
    svg.setAttribute("class", "icon");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", ICONS[name] ?? ICONS.note);
    path.setAttribute("fill-rule", "evenodd");
    svg.append(path);
    return svg;
  }

  function swatch(color) {
    const mark = h("span", { class: "swatch", "aria-hidden": "true" });
    mark.style.background = color;
    return mark;
  }

  function card(title, note, ...children) {
    return h(
      "article",
      { class: "card" },
      title ? h("h2", {}, title) : null,
      note ? h("p", { class: "note" }, note) : null,
      children,
    );
  }

  function plot(name, label, className = "") {
    return h("div", { class: `plot ${className}`, "data-plot": name, role: "img", "aria-label": label });
  }

  /* What a page is about, and the links to its neighbours. */
  function titleLine() {
    const title = h("h2", { class: "page-title", "data-role": "title" });
    return h("div", { class: "title-line" }, title, h("div", { class: "steps", "data-role": "steps" }));
  }

  function empty(text) {
    return h("p", { class: "empty" }, text);
  }

  function say(text) {
    one("[data-role=live]").textContent = text;
  }

  return { h, add, fill, one, icon, swatch, card, plot, titleLine, empty, say };
})();
