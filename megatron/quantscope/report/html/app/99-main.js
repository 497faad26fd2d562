"use strict";

/* Unpacks, then draws the page that the hash names. documentElement.dataset.ready says that a drawing is complete. */

Report.main = (() => {
  const { one } = Report.dom;
  const { dataset } = document.documentElement;
  let drawing = 0;
  let views = 0; // pages seen since the report was opened
  let shown = null;

  function fail(problem) {
    const text = String(problem?.message ?? problem);
    dataset.error = text;
    const banner = one("[data-role=error]");
    banner.textContent = `The report could not draw this: ${text}`;
    banner.hidden = false;
    console.error(problem);
  }

  function forget() {
    delete dataset.error;
    one("[data-role=error]").hidden = true;
  }

  async function draw(state) {
    drawing += 1;
    const own = drawing;
    delete dataset.ready;
    forget();
    const refocus = focusKeeper();
    const section = show(state.view);
    try {
      await Report[state.view].render(section, state);
      Report.header.tabs(state.view);
      await Report.plots.settled();
    } catch (problem) {
      fail(problem);
    }
    refocus(section);
    if (own === drawing) Object.assign(dataset, { ready: "true", view: state.view });
  }

  /* A drawing makes links anew or hides them: the focus goes to the link of the same words, else to the page. */
  function focusKeeper() {
    const held = document.activeElement;
    const words = held?.textContent;
    return (section) => {
      if (held === document.body || document.activeElement !== document.body) return;
      const same = [...section.querySelectorAll("a, button")].find((link) => link.textContent === words);
      (same ?? one("main")).focus({ preventScroll: true });
    };
  }

  /* A page that is opened begins at its top; a choice changed on it leaves the reader where they are. */
  function show(view) {
    const path = window.location.hash.split("?")[0];
    for (const section of document.querySelectorAll("[data-view]"))
      if (section !== document.documentElement) section.hidden = section.dataset.view !== view;
    if (path !== shown) {
      views += 1;
      if (shown !== null && view !== "tensor" && view !== "attention") window.scrollTo(0, 0);
      else if (shown !== null && !shown.startsWith(`#/${view}`)) window.scrollTo(0, 0);
    }
    shown = path;
    return one(`section[data-view=${view}]`);
  }

  async function start() {
    Report.fail = fail;
    window.addEventListener("error", (event) => fail(event.error ?? event.message));
    window.addEventListener("unhandledrejection", (event) => fail(event.reason));
    try {
      await Promise.all([Report.packed.run("plotly"), Report.data.load()]);
    } catch (problem) {
      one("[data-role=loading]").hidden = true;
      return fail(problem);
    }
    one("[data-role=loading]").remove();
    chooseTheme();
    Report.header.draw();
    Report.keys.start();
    one("[data-action=skip]").addEventListener("click", skip);
    Report.router.onChange(draw);
    return Report.router.start();
  }

  /* The hash is the page's state, so the link to the content moves the focus itself. */
  function skip(event) {
    event.preventDefault();
    one("main").focus();
  }

  function chooseTheme() {
    const control = one("[data-control=theme]");
    control.value = Report.theme.choice();
    control.addEventListener("change", () => Report.theme.choose(control.value));
    Report.theme.onChange(() => draw(Report.router.state()));
  }

  return { start, fail, visited: () => views };
})();

Report.main.start();
