"use strict";

/* The filtered rows as a file: every column, numbers to the six digits that the page carries. */

Report.csv = (() => {
  const FORMULA = /^[=+\-@\t\r]/; // what a spreadsheet would compute

  function field(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = FORMULA.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function textOf(rows, columns) {
    const lines = [columns.map((column) => field(column.id)).join(",")];
    for (const cell of rows) lines.push(columns.map((column) => field(column.value(cell))).join(","));
    return `${lines.join("\r\n")}\r\n`;
  }

  function save(rows, columns, name) {
    const address = URL.createObjectURL(new Blob([textOf(rows, columns)], { type: "text/csv;charset=utf-8" }));
    const link = Report.dom.h("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  return { save, textOf };
})();
