"use strict";

/* The line of facts about a tensor, and the files that it was read from. */

Report.facts = (() => {
  const { h } = Report.dom;
  const { count, magnitude, percent, isNumber } = Report.numbers;

  function of({ cell, detail, site }) {
    const value = (name) => detail?.[name] ?? Report.data.value(name, cell);
    const nonfinite = [value("nan"), value("inf")];
    const lines = [
      ["elements", isNumber(value("n")) ? count(value("n")) : null],
      ["shape", detail?.shape ? [].concat(detail.shape).join(" × ") : null],
      ["dtype", detail?.dtype],
      ["amax", magnitude(value("amax"))],
      ["rms", magnitude(value("rms"))],
      ["mean", magnitude(value("mean"))],
      ["kurtosis", magnitude(value("kurtosis"))],
      ["zeros", percent(value("zero_percent"))],
      ["NaN", nonfinite[0] === null ? null : count(nonfinite[0])],
      ["Inf", nonfinite[1] === null ? null : count(nonfinite[1])],
      ["used by", Report.data.axes.gemms[site]?.join(", ") || "no GEMM (a result)"],
    ];
    const bad = (name, text) => (["NaN", "Inf"].includes(name) && text !== "0" ? "alarm" : null);
    return [
      lines
        .filter(([, text]) => text !== null && text !== undefined)
        .map(([name, text]) => h("div", { class: bad(name, text) }, h("dt", {}, name), h("dd", {}, text))),
      files(detail),
    ];
  }

  function files(detail) {
    const names = detail?.files ?? [];
    if (!names.length) return null;
    return h(
      "details",
      { class: "files" },
      h("summary", {}, `${names.length} file${names.length === 1 ? "" : "s"}`),
      h(
        "ul",
        {},
        names.map((name) => h("li", {}, h("code", {}, name))),
      ),
    );
  }

  return { of };
})();
