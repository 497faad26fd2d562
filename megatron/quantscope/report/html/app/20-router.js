"use strict";

/* All that is chosen stands in the hash: #/view/part/part?name=value. So every view is a link, and back works. */

Report.router = (() => {
  const VIEWS = ["overview", "heatmap", "tensor", "attention", "compare", "table"];
  const CARRIED = ["type", "format", "rule", "gemm", "iteration", "rank"]; // what goes along to another page
  const listeners = [];

  /* A hash that a person mistyped must still open something. */
  function decoded(text) {
    try {
      return decodeURIComponent(text.replaceAll("+", " "));
    } catch {
      return text;
    }
  }

  function parse(hash) {
    const [path, query = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
    const [name, ...parts] = path.split("/");
    const params = {};
    for (const pair of query.split("&").filter(Boolean)) {
      const [key, value = ""] = pair.split(/=(.*)/s);
      params[decoded(key)] = decoded(value);
    }
    return { view: VIEWS.includes(name) ? name : "overview", parts: parts.map(decoded), params };
  }

  function hashOf(view, parts = [], params = {}) {
    const path = [view === "overview" ? "" : view, ...parts.map(encodeURIComponent)].join("/");
    const query = Object.entries(params)
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(value)}`)
      .join("&");
    return `#/${path}${query ? `?${query}` : ""}`;
  }

  function state() {
    return parse(window.location.hash);
  }

  function carried() {
    const { params } = state();
    return Object.fromEntries(CARRIED.filter((name) => name in params).map((name) => [name, params[name]]));
  }

  function go(hash) {
    if (hash === window.location.hash) changed();
    else window.location.hash = hash;
  }

  /* Changes some of the choices of the page that is open; small steps replace the entry of the history. */
  function set(changes, { replace = false } = {}) {
    const { view, parts, params } = state();
    const hash = hashOf(view, parts, { ...params, ...changes });
    if (!replace) return go(hash);
    window.history.replaceState(null, "", hash);
    return changed();
  }

  function tensorHash({ type, site, layer, iteration, rank }, more = {}) {
    return hashOf("tensor", [type, site, String(layer)], { ...carried(), type: null, iteration, rank, ...more });
  }

  function changed() {
    for (const listener of listeners) listener(state());
  }

  function start() {
    window.addEventListener("hashchange", changed);
    changed();
  }

  return {
    VIEWS,
    state,
    hashOf,
    carried,
    go,
    set,
    tensorHash,
    start,
    onChange: (listener) => listeners.push(listener),
  };
})();
