"use strict";

/* Runs in <head>, so that the first paint has the right colours. Everything else of the page hangs on `Report` too. */

const Report = {};

Report.theme = (() => {
  const KEY = "quantscope.theme";
  const CHOICES = ["auto", "light", "dark"];
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let choice = remembered();

  /* Storage may be refused to files opened from disk; the choice then lasts as long as the page. */
  function remembered() {
    try {
      const kept = window.localStorage.getItem(KEY);
      return CHOICES.includes(kept) ? kept : "auto";
    } catch {
      return "auto";
    }
  }

  function remember() {
    try {
      window.localStorage.setItem(KEY, choice);
    } catch {
      return;
    }
  }

  function isDark() {
    return choice === "auto" ? system.matches : choice === "dark";
  }

  function apply() {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  }

  function changed() {
    apply();
    for (const listener of listeners) listener();
  }

  function choose(value) {
    choice = CHOICES.includes(value) ? value : "auto";
    remember();
    changed();
  }

  system.addEventListener("change", changed);
  apply();
  return { choose, isDark, choice: () => choice, onChange: (listener) => listeners.push(listener) };
})();
