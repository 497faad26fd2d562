"use strict";

/* The filter's small language: words that must occur in the place, and comparisons: sqnr_mxfp4<15 layer=11 "fc2.y". */

Report.filter = (() => {
  const WORD = /"([^"]*)"|(\S+)/g;
  const COMPARISON = /^([^<>=!\s]+)(<=|>=|!=|<|>|=)(.+)$/;
  const OPERATORS = {
    "<": (a, b) => a < b,
    ">": (a, b) => a > b,
    "<=": (a, b) => a <= b,
    ">=": (a, b) => a >= b,
    "=": (a, b) => a === b,
    "!=": (a, b) => a !== b,
  };

  /* -> {tests: [cell => boolean], problem: text or null}; what can not be understood is said and left out. */
  function compiled(text) {
    const tests = [];
    let problem = null;
    for (const [, quoted, word] of text.matchAll(WORD)) {
      const parts = word?.match(COMPARISON);
      if (!parts) tests.push(containing(quoted ?? word));
      else {
        const made = comparing(parts);
        if (made.problem) problem ??= made.problem;
        else tests.push(made.test);
      }
    }
    return { tests, problem };
  }

  function containing(words) {
    const wanted = words.toLowerCase();
    const texts = Report.columns.list().filter((column) => !column.numeric);
    return (cell) => texts.some((column) => String(column.value(cell)).toLowerCase().includes(wanted));
  }

  function comparing([, name, operator, right]) {
    const wanted = name.toLowerCase();
    const column = Report.columns
      .list()
      .find(({ id, title }) => [id, title].some((known) => known.toLowerCase() === wanted));
    if (!column) return { problem: `There is no column "${name}"; columns are named as ${near(wanted)}.` };
    const compare = OPERATORS[operator];
    if (!column.numeric)
      return { test: (cell) => compare(String(column.value(cell)).toLowerCase(), right.toLowerCase()) };
    const number = Report.columns.order(["exact", "lost"].includes(right) ? right : Number(right));
    if (Number.isNaN(number)) return { problem: `"${right}" after ${name}${operator} is not a number.` };
    return { test: (cell) => column.value(cell) !== null && compare(Report.columns.order(column.value(cell)), number) };
  }

  /* A few names that begin alike, as a hint. */
  function near(wanted) {
    const ids = Report.columns.list().map(({ id }) => id);
    const alike = ids.filter((id) => id.startsWith(wanted.slice(0, 3)));
    return (alike.length ? alike : ids).slice(0, 4).join(", ");
  }

  return { compiled };
})();
