"use strict";

/* The capture's figures: unpacked once, then asked for by place (type, iteration, rank, site, layer) and by column. */

Report.data = (() => {
  const OUTSIDE = -1; // the layer of tensors that belong to none
  const self = { OUTSIDE };

  async function load() {
    const content = await Report.packed.json("data");
    if (content.schema !== 1) throw new Error(`The data has schema ${content.schema}; this page reads schema 1.`);
    Object.assign(self, content);
    indexCells();
    indexNames();
  }

  const keyOf = (...indices) => indices.join();

  function indexCells() {
    const { type, iteration, rank, site, layer } = self.cells;
    self.count = type.length;
    self.layers = self.axes.layers;
    self.byPlace = new Map();
    for (let cell = 0; cell < self.count; cell += 1) {
      self.byPlace.set(keyOf(type[cell], iteration[cell], rank[cell], site[cell], layer[cell]), cell);
    }
  }

  function indexNames() {
    const byKey = (list, key) => new Map((list ?? []).map((entry) => [entry[key], entry]));
    self.metricById = byKey(self.metrics, "id");
    self.formatByName = byKey(self.formats, "name");
    self.runByType = byKey(self.runs, "type");
    self.surfaceByCell = byKey(self.surfaces, "cell");
    self.attentionByPlace = new Map((self.attention ?? []).map((entry) => [keyOf(entry.type, entry.layer), entry]));
  }

  /* The layer of a cell: an index into axes.layers, -1 outside. */
  function layerOf(cell) {
    const index = self.cells.layer[cell];
    return index < 0 ? OUTSIDE : self.axes.layers[index];
  }

  function placeOf(cell) {
    const { axes, cells } = self;
    return {
      type: axes.types[cells.type[cell]],
      iteration: axes.iterations[cells.iteration[cell]],
      rank: axes.ranks[cells.rank[cell]],
      site: axes.sites[cells.site[cell]],
      layer: layerOf(cell),
    };
  }

  function cellAt({ type, iteration, rank, site, layer }) {
    const { axes } = self;
    const key = keyOf(
      axes.types.indexOf(type),
      axes.iterations.indexOf(iteration),
      axes.ranks.indexOf(rank),
      axes.sites.indexOf(site),
      layer === OUTSIDE ? OUTSIDE : axes.layers.indexOf(layer),
    );
    return self.byPlace.get(key) ?? null;
  }

  /* Names a column of values: sqnr of mxfp4 under rceil for the second GEMM is "sqnr/mxfp4_rceil@2". */
  function columnName(metric, { format, rule, gemm } = {}) {
    if (!self.metricById.get(metric)?.per_format) return metric;
    return `${metric}/${treatmentName(format, rule, gemm)}`;
  }

  /* The first of a format's rules is the plain name: mxfp4, mxfp4_rceil, mxfp4@2, mxfp4_rceil@2. */
  function treatmentName(format, rule, gemm) {
    const [first] = self.formatByName.get(format)?.rules ?? [];
    return `${format}${rule && rule !== first ? `_${rule}` : ""}${Number(gemm) === 2 ? "@2" : ""}`;
  }

  function value(column, cell) {
    return cell === null ? null : (self.cells.values[column]?.[cell] ?? null);
  }

  function valuesOf(column) {
    return self.cells.values[column] ?? null;
  }

  /* The columns of details for one cell, as a record. */
  function detail(cell) {
    if (cell === null || !self.details) return null;
    return Object.fromEntries(Object.entries(self.details).map(([name, column]) => [name, column[cell]]));
  }

  function topChannel(cell) {
    return self.details?.top_channels?.[cell]?.[0] ?? null;
  }

  function isOperand(site) {
    return self.axes.operands.includes(site);
  }

  function layersWithOutside() {
    const outside = self.cells.layer.some((index) => index < 0);
    return outside ? [OUTSIDE, ...self.axes.layers] : self.axes.layers;
  }

  /* Float16 little endian in base64 -> numbers. */
  function halves(base64) {
    const view = new DataView(Report.packed.bytesOf(base64).buffer);
    return Float64Array.from({ length: view.byteLength / 2 }, (_, index) => halfOf(view.getUint16(2 * index, true)));
  }

  function halfOf(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 0x1f;
    const fraction = bits & 0x3ff;
    if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }

  /* A tile {shape: [height, width], values, exponent} -> rows of numbers; values are scaled by 2^exponent. */
  function rowsOf({ shape: [height, width], values, exponent = 0 }) {
    const flat = typeof values === "string" ? halves(values) : values.flat(Infinity);
    const row = (index) => Array.from(flat.slice(index * width, (index + 1) * width), scaled);
    const scaled = (value) => (Number.isFinite(value) ? value * 2 ** exponent : null);
    return Array.from({ length: height }, (_, index) => row(index));
  }

  return Object.assign(self, {
    load,
    placeOf,
    cellAt,
    columnName,
    value,
    valuesOf,
    detail,
    topChannel,
    treatmentName,
    isOperand,
    layersWithOutside,
    rowsOf,
    keyOf,
  });
})();
