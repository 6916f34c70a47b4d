"use strict";
// Line charts over uPlot: one cursor for all charts, zoom, marks, legend toggles, log scale, smoothing and CSV.
// A chart has lines [{label, key, colour, raw: {step, time_s, value}, mean, gone, dots, low, high, points}]; all parts but
// label and colour are optional; `points` is what the CSV calls them. Lines whose key is in view.hidden are not drawn.

const charts = [];

// --- ticks ---

function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((n) => n * power >= raw) * power;
  const found = [];
  for (let n = Math.ceil(low / unit); n * unit <= high + unit * 1e-9; n++) found.push(Number((n * unit).toPrecision(12)));
  return found;
}

function clockTicks(low, high, wanted) {
  const units = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const unit = units.find((u) => u * wanted >= high - low) || Math.max(2592000, (high - low) / wanted);
  const shift = new Date(low * 1000).getTimezoneOffset() * 60, found = [];
  for (let t = Math.ceil((low - shift) / unit) * unit + shift; t <= high; t += unit) found.push(t);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const n of [1, 2, 5]) if (n * 10 ** p >= low * 0.999 && n * 10 ** p <= high * 1.001) found.push(n * 10 ** p);
  if (found.length < 2) return ticks(low, high, 4);
  return found.length > 7 ? found.filter((v) => /^1(e|0*$)|^0\.0*1$/.test(String(v))) : found;
}

// --- one chart ---

function chart(options) {
  const one = { options, read: make("span", { class: "read" }), plot: null };
  one.holder = make("div", { class: "chart", role: "img", "aria-label": options.title, vars: { height: `${options.height || 180}px` } });
  const save = make("button", { class: "csv", title: `Download the points of this chart: ${options.title}`, onclick: () => download(one) }, "CSV");
  charts.push(one);
  return make("div", { class: "card" + (options.wide ? " wide" : "") }, make("h3", {}, options.title, one.read, save),
    options.legend ? legend(options.legend) : null, one.holder);
}

/** Items with a key are switches of the lines with that key. */
function legend(items) {
  return make("div", { class: "legend" }, ...items.map((item) => {
    const inner = [make("i", { class: item.box ? "box" : null, vars: { "--k": item.colour } }), item.label];
    if (!item.key) return make("span", {}, ...inner);
    const toggle = () => { if (!view.hidden.delete(item.key)) view.hidden.add(item.key); show(); };
    return make("button", { class: "key", "aria-pressed": String(!view.hidden.has(item.key)), title: "Show or hide", onclick: toggle }, ...inner);
  }));
}

/** The mean of a curve at the chosen smoothing: the server's, or running means of it over a part of the curve. */
const SMOOTHING = { off: null, mean: 0, more: 0.1, most: 0.25 };

function smoothed(mean) {
  const share = SMOOTHING[view.smoothing];
  if (!mean || share === null) return null;
  if (!share) return mean;
  const last = mean.value.length - 1, reach = Math.ceil(share * last / 2);
  const value = mean.value.map((_, at) => {
    const near = Math.min(reach, at, last - at), inside = mean.value.slice(at - near, at + near + 1).filter((v) => v !== null);
    return inside.length ? inside.reduce((a, b) => a + b, 0) / inside.length : null;
  });
  return { ...mean, value };
}

/** The parts that are drawn, in order: each is one series of uPlot. */
function partsOf(options) {
  return options.lines.filter((line) => !line.key || !view.hidden.has(line.key)).flatMap((line) => {
    const mean = smoothed(line.mean);
    return [
      { line, kind: mean ? "raw" : "line", points: line.raw }, { line, kind: "gone", points: line.gone },
      { line, kind: "line", points: mean }, { line, kind: "dots", points: line.dots },
    ].filter((part) => part.points && part.points.value.length);
  });
}

function isLog(options, ys) {
  if (view.scale === "linear") return false;
  const positive = ys.some((v) => v > 0);
  if (view.scale === "log" || options.log === true) return positive;
  return options.log === "wide" && Math.min(...ys) > 0 && Math.max(...ys) > 3 * Math.min(...ys);
}

/** Ranges of both axes over the visible parts, with a margin. */
function ranges(options, parts, x) {
  const seen = view.window && view.window[x] ? view.window[x] : [-Infinity, Infinity];
  const inside = ({ points }) => points.value.filter((v, i) => v !== null && points[x][i] >= seen[0] && points[x][i] <= seen[1]);
  let ys = parts.flatMap(inside);
  for (const { line } of parts) for (const bound of [line.low, line.high]) if (bound) ys.push(...bound.filter((v) => v !== null));
  if (options.steady) {
    // One badly timed step can inflate a rate a thousandfold and would flatten the rest of the curve.
    const means = parts.filter(({ kind, line }) => kind === "line" && line.mean).flatMap(inside);
    if (means.length) { const most = 2 * Math.max(...means); ys = ys.map((v) => Math.min(v, most)); }
  }
  const log = isLog(options, ys);
  if (log) ys = ys.filter((v) => v > 0);
  if (!ys.length) return null;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const { points } of parts) for (const v of points[x]) { if (v < x0) x0 = v; if (v > x1) x1 = v; }
  for (const v of ys) { if (v < y0) y0 = v; if (v > y1) y1 = v; }
  if (view.window && view.window[x]) [x0, x1] = view.window[x];
  if (x1 <= x0) { x0 -= 0.5; x1 += 0.5; }
  if (options.fromZero && !log) y0 = Math.min(0, y0);
  if (options.most !== undefined) y1 = Math.max(y1, options.most);
  if (y1 <= y0) { const by = Math.abs(y0) * 0.05 || 0.5; y0 -= (options.fromZero && y0 >= 0) || log ? 0 : by; y1 += by; }
  if (log) { const by = (y1 / y0) ** 0.04; y0 /= by; y1 *= by; }
  else { const by = (y1 - y0) * 0.05; y1 += by; if (!options.fromZero) y0 -= by; }
  return { x: [x0, x1], y: [y0, y1], log };
}

const css = (value) => value.startsWith("var(") ? getComputedStyle(document.documentElement).getPropertyValue(value.slice(4, -1)).trim() : value;

function draw(one) {
  const { options, holder } = one, height = options.height || 180, width = holder.clientWidth || 560;
  const x = view.axis === "step" ? "step" : "time_s", parts = partsOf(options), range = parts.length ? ranges(options, parts, x) : null;
  if (!range) { holder.replaceChildren(make("p", { class: "none" }, options.lines.length && !parts.length ? "hidden" : "nothing yet")); return; }
  const format = options.format || short, unit = options.unit || 1, styles = {
    raw: { width: 1, alpha: 0.33 }, line: { width: 2 }, gone: { width: 1.3, alpha: 0.8, dash: [2, 3], stroke: css("var(--lost)") }, dots: { width: 2 },
  };
  const series = parts.map(({ line, kind, points }) => {
    const few = points.value.length <= 40, dots = (kind === "dots" && few) || points.value.length === 1, stroke = css(line.colour);
    return { stroke, ...styles[kind], ...(line.dashed && kind === "dots" ? { dash: [5, 4], width: 1.6 } : {}), points: { show: dots, size: 7, width: 1.8, fill: css("var(--card)") } };
  });
  // Lines have their own steps: uPlot.join puts them on one axis. A null stays a gap, a step of another line does not.
  const data = uPlot.join(parts.map(({ points }) => [points[x], range.log ? points.value.map((v) => v > 0 ? v : null) : points.value]));
  const axis = { stroke: css("var(--faint)"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  one.plot = new uPlot({
    width, height, series: [{}, ...series], legend: { show: false }, padding: [12, 10, 0, 0],
    scales: { x: { time: false, range: () => range.x }, y: { distr: range.log ? 3 : 1, range: () => range.y } },
    axes: [
      { ...axis, size: 22, gap: 3, grid: { show: false }, border: { show: true, stroke: css("var(--line)") },
        splits: (u, i, low, high) => x === "step" ? ticks(low, high, width / 90).filter(Number.isInteger) : clockTicks(low, high, width / 90),
        values: (u, found) => found.map((v) => x === "step" ? short(v) : tickClock(v, range.x[1] - range.x[0])) },
      { ...axis, size: 48, gap: 4, grid: { stroke: css("var(--grid)"), width: 1 }, filter: (u, found) => found,
        splits: (u, i, low, high) => range.log ? logTicks(low, high) : ticks(low / unit, high / unit, height / 45).map((tick) => tick * unit),
        values: (u, found) => found.map(format) },
    ],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      sync: { key: "lakh-" + x, scales: ["x", null], filters: { pub: (type) => type === "mousemove" } },
      bind: { dblclick: () => () => zoom(null) } },
    hooks: {
      drawClear: [(u) => drawMarks(u, options, x)], draw: [(u) => drawPoints(u, parts, x)], setCursor: [(u) => readOut(one, u, x)],
      setSelect: [(u) => {
        const { left, width: wide } = u.select;
        if (wide < 4) return;
        const [low, high] = [u.posToVal(left, "x"), u.posToVal(left + wide, "x")];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        zoom(low, high, x);
      }],
    },
  }, data, holder);
}

/** Restarts and spikes as dashed lines with a flag at the top, checkpoints as flags at the bottom. */
function drawMarks(u, options, x) {
  const { ctx, bbox } = u, scale = devicePixelRatio || 1, inside = (v) => v >= u.scales.x.min && v <= u.scales.x.max;
  ctx.save();
  for (const mark of (options.marks || []).filter((m) => inside(m[x]))) {
    const at = u.valToPos(mark[x], "x", true);
    ctx.strokeStyle = ctx.fillStyle = css(mark.what === "serious" ? "var(--bad)" : "var(--warn)");
    ctx.lineWidth = scale;
    ctx.setLineDash([3 * scale, 3 * scale]);
    ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
    flagAt(ctx, at, bbox.top - 6 * scale, 7 * scale, scale);
  }
  ctx.fillStyle = css("var(--checkpoint)");
  let last = -Infinity;
  for (const v of options.checkpoints ? options.checkpoints[x].filter(inside) : []) {
    const at = u.valToPos(v, "x", true);
    if (at - last < 8 * scale) continue;
    flagAt(ctx, at, bbox.top + bbox.height, -5 * scale, scale);
    last = at;
  }
  ctx.restore();
}

function flagAt(ctx, at, y, tall, scale) {
  ctx.beginPath(); ctx.moveTo(at - 4 * scale, y); ctx.lineTo(at + 4 * scale, y); ctx.lineTo(at, y + tall); ctx.fill();
}

/** Intervals of dots, and a red flag for every value that is not a number. */
function drawPoints(u, parts, x) {
  const { ctx, bbox } = u, scale = devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = 1.4 * scale;
  for (const { line, kind, points } of parts) {
    ctx.strokeStyle = css(line.colour);
    ctx.fillStyle = css("var(--bad)");
    points.value.forEach((v, i) => {
      if (points[x][i] < u.scales.x.min || points[x][i] > u.scales.x.max) return;
      const at = u.valToPos(points[x][i], "x", true);
      if (v === null && points === line.raw) flagAt(ctx, at, bbox.top, 7 * scale, scale);
      if (kind !== "dots" || !line.low || line.low[i] === null || v === null) return;
      const [low, high] = [line.low[i], line.high[i]].map((bound) => u.valToPos(u.scales.y.distr === 3 ? Math.max(bound, u.scales.y.min) : bound, "y", true));
      ctx.beginPath();
      for (const y of [low, high]) { ctx.moveTo(at - 3 * scale, y); ctx.lineTo(at + 3 * scale, y); }
      ctx.moveTo(at, low); ctx.lineTo(at, high);
      ctx.stroke();
    });
  }
  ctx.restore();
}

// --- pointing, zooming, CSV ---

function nearest(list, value) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (list[mid] < value) low = mid; else high = mid; }
  return high < 0 || Math.abs(list[low] - value) < Math.abs(list[high] - value) ? low : high;
}

const MARK_REACH_PX = 5;

/** Values at the cursor; the text of a mark when the cursor is on it. */
function readOut(one, u, x) {
  one.read.textContent = "";
  if (u.cursor.left === null || u.cursor.left === undefined || u.cursor.left < 0) return;
  const value = u.posToVal(u.cursor.left, "x"), format = one.options.format || short;
  const mark = (one.options.marks || []).find((m) => Math.abs(u.valToPos(m[x], "x") - u.cursor.left) <= MARK_REACH_PX);
  const labels = one.options.lines.filter((line) => !line.key || !view.hidden.has(line.key)).map((line) => {
    const points = line.raw || line.dots || line.mean;
    if (!points || !points.value.length) return null;
    const found = points.value[nearest(points[x], value)];
    return `${line.label ? line.label + " " : ""}${found === null ? "not a number" : format(found)}`;
  }).filter(Boolean);
  one.read.textContent = `${x === "step" ? "step " + whole(value) : clock(value, true)}   ${mark ? mark.text : labels.slice(0, 4).join("   ")}`;
}

function zoom(low, high, x) {
  if (low === null) view.window = null;
  else {
    // Zoom the other axis to the same part of the run.
    const other = x === "step" ? "time_s" : "step", bounds = { [x]: [low, high] };
    const parts = view.data.details.map((run) => run.curves.loss).filter(Boolean);
    const inside = parts.flatMap((part) => part[other].filter((_, i) => part[x][i] >= low && part[x][i] <= high));
    if (inside.length > 1) bounds[other] = [Math.min(...inside), Math.max(...inside)];
    view.window = bounds;
  }
  view.etag = null;
  show();
  poll(true);
}

/** The points of a chart as the page has them: measured ones, and means as drawn. */
function csvText(one) {
  const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`, rows = ["line,points,step,time_s,value,low,high"];
  for (const { line, kind, points } of partsOf(one.options)) {
    const name = line.points ? line.points : points === line.raw || kind === "dots" ? "measured" : kind === "gone" ? "lost" : "mean";
    points.value.forEach((v, i) => {
      const bounds = kind === "dots" && line.low ? [line.low[i], line.high[i]] : [null, null];
      rows.push([quoted(line.label || one.options.title), name, points.step[i], points.time_s[i], ...[v, ...bounds].map((n) => n ?? "")].join());
    });
  }
  return rows.join("\n") + "\n";
}

function download(one) {
  const url = URL.createObjectURL(new Blob([csvText(one)], { type: "text/csv" }));
  make("a", { href: url, download: one.options.title.replace(/[^\w.-]+/g, "-") + ".csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
