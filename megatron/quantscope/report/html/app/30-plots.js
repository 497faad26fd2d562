"use strict";

/* The one look of all plots: fonts and colours out of the style sheet's variables, so that they follow the theme. */

Report.plots = (() => {
  const CONFIG = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "toggleSpikelines"],
    toImageButtonOptions: { format: "svg" },
  };
  const LIGHTER_IN_DARK = 0.32;
  const pending = new Set();

  function variable(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function palette() {
    const names = ["ink", "muted", "line", "sheet", "accent", "alarm", "missing", "exact", "faint"];
    return Object.fromEntries(names.map((name) => [name, variable(name)]));
  }

  const channels = (color) => [1, 3, 5].map((start) => Number.parseInt(color.slice(start, start + 2), 16));

  function mixed(color, other, share) {
    const parts = channels(color).map((part, index) => Math.round(part * (1 - share) + channels(other)[index] * share));
    return `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
  }

  /* Formats keep their colours of the figures; on a dark ground they are lifted towards white. */
  function tone(color) {
    if (!/^#[0-9a-f]{6}$/i.test(color ?? "")) return variable("ink");
    return Report.theme.isDark() ? mixed(color, "#ffffff", LIGHTER_IN_DARK) : color;
  }

  const runColor = (type) => tone(Report.data.runByType.get(type)?.color);
  const formatColor = (name) => tone(Report.data.formatByName.get(name)?.color);

  function axis(colors, more = {}) {
    return {
      gridcolor: colors.line,
      linecolor: colors.line,
      zerolinecolor: colors.line,
      tickcolor: colors.line,
      tickfont: { color: colors.muted, size: 11 },
      automargin: true,
      ...more,
      title: {
        font: { color: colors.muted, size: 12 },
        standoff: 8,
        ...(typeof more.title === "string" ? { text: more.title } : more.title),
      },
    };
  }

  function layout(colors, more) {
    const axes = Object.fromEntries(
      Object.entries(more)
        .filter(([name]) => /^[xy]axis\d*$/.test(name))
        .map(([name, value]) => [name, axis(colors, value)]),
    );
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: variable("font"), color: colors.ink, size: 12 },
      margin: { l: 56, r: 16, t: 12, b: 44 },
      hoverlabel: {
        bgcolor: colors.sheet,
        bordercolor: colors.line,
        font: { color: colors.ink, size: 12 },
        align: "left",
      },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colors.ink, size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colors.muted, activecolor: colors.accent },
      transition: { duration: 0 },
      ...more,
      xaxis: axis(colors, more.xaxis),
      yaxis: axis(colors, more.yaxis),
      ...axes,
    };
  }

  function colorbar(colors, title, ticks = {}) {
    return {
      ...ticks,
      title: { text: title, side: "top", font: { color: colors.muted, size: 11 } },
      thickness: 10,
      outlinewidth: 0,
      tickfont: { color: colors.muted, size: 11 },
      ticks: "outside",
      ticklen: 3,
      tickcolor: colors.line,
      xpad: 8,
      ypad: 4,
    };
  }

  /* make(colors) -> {traces, layout}; the node keeps its listeners from one drawing to the next. Plotly keeps the width
     of the first drawing, too, so a node whose width has changed since begins anew. */
  function draw(node, make) {
    if (node._fullLayout && Math.abs(node._fullLayout.width - node.clientWidth) > 1) clear(node);
    const colors = palette();
    const { traces, layout: more } = make(colors);
    const height = more.height ?? 300;
    node.style.height = `${height}px`;
    const drawn = Plotly.react(node, traces, layout(colors, { ...more, height }), CONFIG).catch(Report.fail);
    pending.add(drawn);
    drawn.finally(() => pending.delete(drawn));
    return drawn;
  }

  /* Listeners of plotly exist only after the first drawing, and must be set once. */
  function onClick(node, listener) {
    if (node.dataset.clicks) return;
    node.dataset.clicks = "true";
    node.on("plotly_click", (event) => listener(event.points[0], event));
  }

  function clear(node) {
    Plotly.purge(node);
    node.style.height = "0";
    delete node.dataset.clicks;
  }

  const settled = () => Promise.all(pending);

  /* A run of powers of two that fits the axis: [exponents, labels]. */
  function powers(lower, upper, most = 12) {
    const first = Math.ceil(lower);
    const last = Math.floor(upper);
    const step = [1, 2, 4, 8, 16, 32, 64].find((size) => (last - first) / size <= most) ?? 128;
    const values = [];
    for (let exponent = Math.ceil(first / step) * step; exponent <= last; exponent += step) values.push(exponent);
    return { tickvals: values, ticktext: values.map((exponent) => Report.numbers.power(exponent)) };
  }

  /* Ticks of a logarithmic axis from 10^low to 10^high, in the type of all other ticks. */
  function decades(low, high, most = 6) {
    const step = Math.max(1, Math.ceil((high - low) / most));
    const values = [];
    for (let power = Math.ceil(low / step) * step; power <= high; power += step) values.push(power);
    const text = (power) =>
      power >= 0 && power < 4 ? (10 ** power).toLocaleString("en-US") : Report.numbers.power(power, 10);
    return {
      type: "log",
      range: [low, high],
      tickvals: values.map((power) => 10 ** power),
      ticktext: values.map(text),
    };
  }

  /* Which of `size` tokens, channels or blocks lies in the middle of each tile of an image. */
  function middles(tiles, size) {
    return Array.from({ length: tiles }, (_, tile) => Math.floor(((tile + 0.5) * size) / tiles));
  }

  return { draw, middles, decades, colorbar, clear, onClick, settled, powers, variable, tone, runColor, formatColor };
})();
