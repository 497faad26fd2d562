"use strict";

/* Numbers as the page writes them: short, and never more exact than they are. The CSV has all six digits. */

Report.numbers = (() => {
  const NONE = "–";
  const COUNT_SUFFIXES = ["", " k", " M", " G", " T"];
  const BYTE_SUFFIXES = [" B", " kB", " MB", " GB", " TB"];
  const LEAST_PERCENT = 0.01;
  const LEGEND = 26; // characters

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const tidy = (value, digits = 4) => String(Number(value.toPrecision(digits)));

  function scaled(value, suffixes) {
    if (!isNumber(value)) return NONE;
    let power = 0;
    let rest = value;
    while (Math.abs(rest) >= 999.5 && power < suffixes.length - 1) {
      rest /= 1000;
      power += 1;
    }
    return (power ? tidy(rest, 3) : String(Math.round(rest))) + suffixes[power];
  }

  /* 22592 -> "22,592"; 3.14159 -> "3.142"; 3.1e-7 -> "3.10e-7" */
  function magnitude(value) {
    if (!isNumber(value)) return typeof value === "string" ? value : NONE;
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= (Number.isInteger(value) ? 1e12 : 1e7)) return value.toExponential(2).replace("e+", "e");
    return size >= 1e3 ? Math.round(value).toLocaleString("en-US") : tidy(value);
  }

  function signed(value) {
    return isNumber(value) && value > 0 ? `+${magnitude(value)}` : magnitude(value).replace("-", "−");
  }

  /* An exact zero is "0 %", so that nothing and little differ. */
  function percent(value) {
    if (!isNumber(value)) return NONE;
    if (value > 0 && value < LEAST_PERCENT) return `< ${LEAST_PERCENT} %`;
    return `${tidy(value, value < 100 - LEAST_PERCENT ? 3 : 5)} %`;
  }

  function signedPercent(value) {
    if (!isNumber(value)) return NONE;
    const size = Math.abs(value);
    return `${value > 0 ? "+" : value < 0 ? "−" : ""}${size === 0 ? "0" : tidy(size, 3)} %`;
  }

  function decibels(value) {
    if (typeof value === "string") return value;
    return isNumber(value) ? `${value.toFixed(1)} dB` : NONE;
  }

  const WRITERS = {
    percent,
    db: decibels,
    binades: (value) => (isNumber(value) ? `${value.toFixed(1)} binades` : NONE),
  };

  function ofMetric(metric, value) {
    return (WRITERS[metric.scale] ?? magnitude)(value);
  }

  /* Tick labels: plotly knows <sup>. */
  function power(exponent, base = 2) {
    return `${base}<sup>${String(exponent).replace("-", "−")}</sup>`;
  }

  function layer(value) {
    return value < 0 ? "outside the layers" : `layer ${value}`;
  }

  /* For legends, which must leave room for the plot. */
  function short(text) {
    return plain(text.length > LEGEND ? `${text.slice(0, LEGEND - 1)}…` : text);
  }

  /* Plotly reads its texts as a little HTML: names out of files must not be. */
  function plain(text) {
    return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  }

  return {
    NONE,
    isNumber,
    magnitude,
    signed,
    percent,
    signedPercent,
    decibels,
    ofMetric,
    power,
    layer,
    plain,
    short,
    count: (value) => scaled(value, COUNT_SUFFIXES),
    bytes: (value) => scaled(value, BYTE_SUFFIXES),
  };
})();
