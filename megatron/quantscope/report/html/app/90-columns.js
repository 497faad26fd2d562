"use strict";

/* The columns of the table: where a cell is, its metrics, and what each format does to it as METRIC_FORMAT. */

Report.columns = (() => {
  const { magnitude, percent, decibels, NONE } = Report.numbers;
  const PLACES = ["type", "site", "layer", "iteration", "rank"];
  const TEXTS = ["type", "site", "family"];
  const WRITERS = { percent, db: (value) => decibels(value).replace(" dB", "") };
  const UNITS = { db: "dB", binades: "binades" };
  let all = null;

  /* -> [{id, title, numeric, group, value(cell), write(value)}] */
  function list() {
    const { metrics } = Report.data;
    const plainFirst = [
      ...metrics.filter((metric) => !metric.per_format),
      ...metrics.filter((metric) => metric.per_format),
    ];
    all ??= [...places(), ...plainFirst.flatMap(ofMetric)];
    return all;
  }

  function places() {
    const titles = new Map(Report.data.table.columns.map(({ id, title }) => [id, title]));
    const readers = placeReaders();
    return [...PLACES, "family"].map((id) => ({
      id,
      title: titles.get(id) ?? id,
      numeric: !TEXTS.includes(id),
      group: "place",
      value: readers[id],
      write: (value) => (value === null ? "all" : id === "layer" && value < 0 ? NONE : String(value)),
    }));
  }

  function placeReaders() {
    const { axes, cells } = Report.data;
    const read = (name, axis) => (cell) => axis[cells[name][cell]] ?? null;
    return {
      type: read("type", axes.types),
      site: read("site", axes.sites),
      layer: (cell) => (cells.layer[cell] < 0 ? -1 : axes.layers[cells.layer[cell]]),
      iteration: read("iteration", axes.iterations),
      rank: read("rank", axes.ranks),
      family: (cell) => axes.families[axes.sites[cells.site[cell]]] ?? null,
    };
  }

  function ofMetric(metric) {
    const { values } = Report.data.cells;
    return Object.keys(values)
      .filter((name) => name === metric.id || name.startsWith(`${metric.id}/`))
      .map((name) => {
        const treatment = name.slice(metric.id.length + 1);
        return {
          id: name.replace("/", "_"),
          title: UNITS[metric.scale] ? `${metric.title}, ${UNITS[metric.scale]}` : metric.title,
          treatment,
          help: metric.help,
          numeric: true,
          group: treatment.replace(/(_rceil|_pow2|_unscaled)?(@2)?$/, "") || "metrics",
          plain: metric.id === "sqnr" && Report.data.formatByName.has(treatment),
          value: (cell) => values[name][cell] ?? null,
          write: WRITERS[metric.scale] ?? magnitude,
        };
      });
  }

  /* The choices of columns: the usual, all of one format, everything. */
  function groups() {
    const formats = Report.data.formats.filter((format) => list().some((column) => column.group === format.name));
    return [
      ["usual", "metrics and SQNR"],
      ...formats.map((format) => [format.name, `all of ${format.title}`]),
      ["all", "all"],
    ];
  }

  function shown(group) {
    const several = (column) =>
      !["iteration", "rank"].includes(column.id) || Report.data.axes[`${column.id}s`].length > 1;
    const wanted =
      {
        usual: (column) => column.group === "metrics" || column.plain,
        all: () => true,
      }[group] ?? ((column) => column.group === group);
    return list().filter((column) => (column.group === "place" ? several(column) : wanted(column)));
  }

  /* "exact" is more than any number of dB, "lost" less. */
  function order(value) {
    if (value === "exact") return Infinity;
    return value === "lost" ? -Infinity : value;
  }

  return { list, groups, shown, order };
})();
