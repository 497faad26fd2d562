"use strict";

/* The maps of the heads: small ones painted by hand, and the chosen one to read. */

Report.heads = (() => {
  const { h, fill, one } = Report.dom;
  const { percent, isNumber } = Report.numbers;
  const LEAST_LOG2 = -10; // probabilities below 2^-10 have the colour of 2^-10
  const PROBABILITIES = {
    tickvals: [-10, -8, -6, -4, -2, 0],
    ticktext: ["≤ 0.1 %", "0.4 %", "1.6 %", "6 %", "25 %", "100 %"],
  };
  const HEIGHT = 600; // but no more than the map is wide

  function draw(root, entry, shown) {
    const items = entry.maps.map((tile) => {
      const current = tile === shown;
      const figures = [
        isNumber(entry.first_token?.[tile.head]) ? `first token ${percent(100 * entry.first_token[tile.head])}` : null,
        isNumber(entry.entropy_bits?.[tile.head]) ? `entropy ${entry.entropy_bits[tile.head].toFixed(2)} bit` : null,
      ];
      return h(
        "button",
        {
          type: "button",
          class: "head-map",
          "data-head": tile.head,
          "aria-pressed": String(current),
          click: () => Report.router.set({ head: tile.head }, { replace: true }),
        },
        painted(tile),
        h("b", {}, `head ${tile.head}`),
        figures.filter(Boolean).map((text) => h("span", {}, text)),
      );
    });
    const place = one("[data-role=heads]", root);
    const focused = place.contains(document.activeElement);
    fill(place, items);
    if (focused) one("[aria-pressed=true]", place)?.focus();
  }

  /* A pixel a tile, by hand: nine plots of a library would take a second. */
  function painted(tile) {
    const [height, width] = tile.shape;
    const canvas = h("canvas", { width, height, "aria-hidden": "true" });
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    Report.data
      .rowsOf(tile)
      .flat()
      .forEach((value, index) => {
        const ahead = (index % width) * height >= (Math.floor(index / width) + 1) * width; // keys after the query
        const share = value > 0 ? Math.max(0, 1 - Math.log2(value) / LEAST_LOG2) : 0;
        image.data.set([...Report.scales.viridis(share), value > 0 || !ahead ? 255 : 0], 4 * index);
      });
    context.putImageData(image, 0, 0);
    return canvas;
  }

  function map(root, tile, { queries, keys }) {
    one("[data-role=head-title]", root).textContent = `Head ${tile.head}`;
    const rows = Report.data.rowsOf(tile);
    const node = one("[data-plot=attention-map]", root);
    Report.plots.draw(node, (colors) => ({
      traces: [
        {
          type: "heatmap",
          x: Report.plots.middles(tile.shape[1], keys),
          y: Report.plots.middles(tile.shape[0], queries),
          z: rows.map((row, query) =>
            row.map((value, key) =>
              value > 0
                ? Math.max(LEAST_LOG2, Math.log2(value))
                : key * rows.length >= (query + 1) * row.length
                  ? null
                  : LEAST_LOG2,
            ),
          ),
          text: rows.map((row) => row.map((value) => percent(100 * value))),
          colorscale: Report.scales.VIRIDIS,
          zmin: LEAST_LOG2,
          zmax: 0,
          hovertemplate: "query %{y}, key %{x}, the largest near there<br>%{text}<extra></extra>",
          colorbar: Report.plots.colorbar(colors, "", PROBABILITIES),
        },
      ],
      layout: {
        height: Math.min(HEIGHT, node.clientWidth),
        margin: { l: 52, r: 8, t: 8, b: 46 },
        plot_bgcolor: colors.missing,
        xaxis: { title: "key", showgrid: false, zeroline: false, constrain: "domain" },
        yaxis: {
          title: "query",
          autorange: "reversed",
          showgrid: false,
          zeroline: false,
          scaleanchor: "x",
          constrain: "domain",
        },
      },
    }));
  }

  return { draw, map };
})();
