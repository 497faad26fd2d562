"use strict";

/* One metric of one run over all sites and layers: what the heatmap page and the overview's small maps both show. */

Report.heat = (() => {
  const { plain, magnitude, signed, ofMetric, layer: layerText, isNumber } = Report.numbers;
  const HOVER_METRICS = ["amax", "rms", "mean", "kurtosis", "crest", "top_ratio", "zero_percent", "nonfinite"];

  const FAMILIES = {
    all: () => true,
    operands: (site) => Report.data.isOperand(site),
  };

  function sitesOf(tensor) {
    const { sites, families } = Report.data.axes;
    const keep = FAMILIES[tensor] ?? ((site) => families[site] === tensor);
    return sites.filter(keep);
  }

  function tensorOptions() {
    const families = [...new Set(Object.values(Report.data.axes.families))];
    return [["all", "all"], ["operands", "GEMM operands"], ...families.map((family) => [family, `${family}s`])];
  }

  /* choice: {metric, tensor, versus, type, iteration, rank, format, rule, gemm} */
  function view(choice, { brief = false } = {}) {
    const metric = Report.data.metricById.get(choice.metric);
    const column = Report.data.columnName(metric.id, choice);
    const cellOf = (site, layer) => Report.data.cellAt({ ...choice, site, layer });
    const valueOf = (site, layer) => Report.data.value(column, cellOf(site, layer));
    const compared = choice.versus === "baseline" && choice.type !== Report.data.baseline;
    const rows = sitesOf(choice.tensor).filter((site) =>
      Report.data.layersWithOutside().some((layer) => cellOf(site, layer) !== null),
    );
    const columns = Report.data.layersWithOutside();
    const valueAt = compared ? (site, layer) => change(metric, column, choice, site, layer) : valueOf;
    const numbers = rows.flatMap((site) => columns.map((layer) => valueAt(site, layer)));
    const { unit, text } = compared ? changeUnit(metric) : { unit: metric.unit, text: metric.title };
    return {
      metric,
      rows,
      columns,
      valueAt,
      compared,
      unit,
      numbers,
      scale: compared
        ? Report.scales.difference(numbers, unit)
        : Report.scales.ofMetric(metric, numbers, choice.colors === "own"),
      title: `${text}${unit ? ` (${unit})` : ""}`,
      textAt: (site, layer) =>
        hoverText(
          metric,
          column,
          cellOf(site, layer),
          { site, layer },
          brief,
          compared ? valueAt(site, layer) : null,
          unit,
        ),
      cellOf,
    };
  }

  const IN_BINADES = ["log2"];

  function changeUnit(metric) {
    const unit = IN_BINADES.includes(metric.scale)
      ? "binades"
      : metric.scale === "percent"
        ? "percent points"
        : metric.unit;
    return { unit, text: `${metric.title}, change` };
  }

  function change(metric, column, choice, site, layer) {
    const [own, base] = [choice.type, Report.data.baseline].map((type) => {
      return Report.data.value(column, Report.data.cellAt({ ...choice, type, site, layer }));
    });
    if (!isNumber(own) || !isNumber(base)) return null;
    if (!IN_BINADES.includes(metric.scale)) return own - base;
    return own > 0 && base > 0 ? Math.log2(own / base) : own === base ? 0 : null;
  }

  function hoverText(metric, column, cell, { site, layer }, brief, difference, unit) {
    const head = `<b>${plain(site)}</b> · ${layerText(layer)}`;
    if (cell === null) return head;
    const lines = [head, `<b>${plain(metric.title)} ${ofMetric(metric, Report.data.value(column, cell))}</b>`];
    if (difference !== null) lines.push(`change against the baseline: ${signed(difference)} ${unit}`);
    const top = Report.data.topChannel(cell);
    if (top) lines.push(`largest in channel ${top[0]}: ${magnitude(top[1])}`);
    if (brief) return lines.join("<br>");
    for (const name of HOVER_METRICS) {
      const other = Report.data.metricById.get(name);
      if (other && other !== metric)
        lines.push(`${plain(other.title)} ${ofMetric(other, Report.data.value(name, cell))}`);
    }
    const count = Report.data.details?.n?.[cell];
    if (count) lines.push(`elements ${Report.numbers.count(count)}`);
    const rates = sqnrLines(cell);
    if (rates.length) lines.push("<b>SQNR</b>", ...rates);
    return lines.join("<br>");
  }

  function sqnrLines(cell) {
    return Report.data.formats
      .map((format) => [format.title, Report.data.value(`sqnr/${format.name}`, cell)])
      .filter(([, value]) => value !== null)
      .map(([title, value]) => `${plain(title)} ${Report.numbers.decibels(value)}`);
  }

  /* The cell that a reader must not miss: the worst by the metric's own sense. */
  function extreme({ metric, rows, columns, valueAt, compared, cellOf, unit }) {
    if (!metric.worse && !compared) return null;
    const sign = compared ? 1 : metric.worse === "low" ? -1 : 1;
    let best = null;
    for (const site of rows) {
      for (const layer of columns) {
        const value = valueAt(site, layer);
        const weight = isNumber(value) ? sign * (compared ? Math.abs(value) : value) : -Infinity;
        if (isNumber(value) && (!best || weight > best.weight)) best = { site, layer, value, weight };
      }
    }
    if (!best || (best.value === 0 && sign > 0)) return null;
    const top = Report.data.topChannel(cellOf(best.site, best.layer));
    const channel = metric.id === "amax" && !compared && top ? `, channel ${top[0]}` : "";
    const written = compared ? `${signed(best.value)} ${unit}` : ofMetric(metric, best.value);
    return {
      ...best,
      text: `${written}${channel}`,
      long: `${best.site}, ${layerText(best.layer)}: ${written}${channel}`,
    };
  }

  return { view, extreme, tensorOptions, sitesOf };
})();
