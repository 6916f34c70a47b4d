"use strict";
// Draws the data of data.json without a library. Talks to its own server only, and to none in a saved page.
// Everything that comes from a run is inserted as text, never as markup.

const saved = JSON.parse(document.getElementById("data").textContent || "null");
const view = { run: null, axis: "step", window: null, data: saved, etag: null, updated: 0, search: "", sort: null, settings: "", open: {} };
const POLL_MS = 2000;
const COLOURS = 8;

// --- elements and number formats ---

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...inner) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "vars") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...inner.filter((item) => item !== null && item !== undefined));
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [limit, word] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return digits(value / (word === "k" ? 1e3 : limit), 3) + word;
  return digits(value, 4);
}

function digits(value, most) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return String(Number(value.toPrecision(most)));
}

const percent = (value) => value === null || value === undefined ? "–" : (value < 5e-5 ? "0" : digits(100 * value, value < 0.1 ? 2 : 3)) + " %";
const bytes = (value) => value === null || value === undefined ? "–" : digits(value / 2 ** 30, 3) + " GiB";
const whole = (value) => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");

const many = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return digits(seconds, 2) + " s";
  if (seconds < 100) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.floor(seconds / 60) + " min" + (seconds < 600 ? ` ${Math.round(seconds % 60)} s` : "");
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h " + Math.round((seconds % 3600) / 60) + " min";
  return digits(seconds / 86400, 3) + " days";
}

function clock(seconds, long) {
  const date = new Date(seconds * 1000);
  const day = date.toLocaleDateString("en-CA"), hour = date.toTimeString().slice(0, 8);
  return long ? `${day.slice(5)} ${hour}` : hour;
}

const tickClock = (seconds, range) => range > 432000 ? clock(seconds, true).slice(0, 5) : clock(seconds).slice(0, range > 600 ? 5 : 8);

// --- scales ---

function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((n) => n * power >= raw) * power;
  const found = [];
  for (let n = Math.ceil(low / unit); n * unit <= high + unit * 1e-9; n++) found.push(Number((n * unit).toPrecision(12)));
  return found;
}

function clockTicks(low, high, wanted) {
  const units = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const unit = units.find((u) => u * wanted >= high - low) || 2592000;
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
// lines: [{label, colour, raw: {step, time_s, value}, mean, gone, dots, low, high}]; all parts but label and colour are optional.

const charts = [];

function chart(options) {
  const box = make("div", { class: "card" + (options.wide ? " wide" : "") });
  const read = make("span", { class: "read" });
  box.append(make("h3", {}, options.title, read));
  if (options.legend) box.append(legend(options.legend));
  const svg = make("svg", { height: options.height || 180, role: "img", "aria-label": options.title });
  box.append(svg);
  charts.push({ options, box, svg, read });
  return box;
}

function legend(items) {
  return make("div", { class: "legend" }, ...items.map((item) =>
    make("span", {}, make("i", { class: item.box ? "box" : null, vars: { "--k": item.colour } }), item.label)));
}

function draw(one) {
  const { svg, options } = one;
  const width = svg.clientWidth || 560, height = options.height || 180;
  const left = 48, right = 10, top = 10, bottom = 22;
  const x = view.axis === "step" ? "step" : "time_s";
  const all = options.lines.flatMap((line) => [line.raw, line.mean, line.gone, line.dots].filter(Boolean));
  const seen = view.window && view.window[x] ? view.window[x] : [-Infinity, Infinity];
  const within = (part) => part.value.filter((v, i) => v !== null && part[x][i] >= seen[0] && part[x][i] <= seen[1]);
  const xs = all.flatMap((part) => part[x]);
  let ys = all.flatMap(within);
  for (const line of options.lines) for (const bound of [line.low, line.high])
    if (bound) ys.push(...bound.filter((v) => v !== null));
  if (options.steady) {
    // One badly timed step can inflate a rate a thousandfold and would flatten the rest of the curve.
    const most = 2 * Math.max(...options.lines.flatMap((line) => line.mean ? within(line.mean) : []));
    ys = ys.map((v) => Math.min(v, most));
  }
  const log = options.log === "wide" ? Math.max(...ys) > 3 * Math.min(...ys) && Math.min(...ys) > 0 : Boolean(options.log);
  if (log) ys = ys.filter((v) => v > 0);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!ys.length) { svg.append(make("text", { x: left, y: height / 2 }, "nothing yet")); return; }
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const v of xs) { if (v < x0) x0 = v; if (v > x1) x1 = v; }
  for (const v of ys) { if (v < y0) y0 = v; if (v > y1) y1 = v; }
  if (view.window && !options.clock) [x0, x1] = view.window[x] || [x0, x1];
  if (x1 <= x0) { x0 -= 0.5; x1 += 0.5; }
  if (options.fromZero) y0 = Math.min(0, y0);
  if (options.most !== undefined) y1 = Math.max(y1, options.most);
  if (y1 <= y0) { const by = Math.abs(y0) * 0.05 || 0.5; y0 -= options.fromZero && y0 >= 0 ? 0 : by; y1 += by; }
  if (log) { const by = (y1 / y0) ** 0.04; y0 /= by; y1 *= by; }
  else { const by = (y1 - y0) * 0.05; y1 += by; if (!options.fromZero) y0 -= by; }
  const f = log ? Math.log10 : (v) => v;
  const px = (v) => left + (v - x0) / (x1 - x0) * (width - left - right);
  const py = (v) => Math.max(top - 4, top + (f(y1) - f(v)) / (f(y1) - f(y0)) * (height - top - bottom));
  one.place = { x, x0, x1, left, width, right, px };

  const format = options.format || short;
  const unit = options.unit || 1;
  for (const v of log ? logTicks(y0, y1) : ticks(y0 / unit, y1 / unit, height / 45).map((tick) => tick * unit)) {
    const y = py(v);
    svg.append(make("line", { class: "grid-line", x1: left, x2: width - right, y1: y, y2: y }),
      make("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, format(v)));
  }
  const along = x === "step" ? ticks(x0, x1, width / 90).filter(Number.isInteger) : clockTicks(x0, x1, width / 90);
  for (const v of along)
    svg.append(make("text", { x: px(v), y: height - 6, "text-anchor": "middle" }, x === "step" ? short(v) : tickClock(v, x1 - x0)));
  svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));

  for (const mark of options.marks || []) {
    if (mark[x] < x0 || mark[x] > x1) continue;
    const at = px(mark[x]), group = make("g", { class: "m-" + mark.what });
    group.append(make("line", { class: "mark", x1: at, x2: at, y1: top, y2: height - bottom }),
      make("path", { class: "flag", d: `M${at - 4} ${top - 4}h8l-4 7z` }));
    group.append(make("title", {}, `step ${mark.step}: ${mark.text}`));
    svg.append(group);
  }

  if (options.checkpoints) svg.append(flags(options.checkpoints[x].filter((v) => v >= x0 && v <= x1).map(px), height - bottom));

  const clip = make("g", {});
  for (const line of options.lines) {
    const group = make("g", { vars: { "--k": line.colour } });
    if (line.raw) group.append(make("path", { class: line.mean ? "raw" : "mean", d: path(line.raw, x, px, py, log, x0, x1) }));
    if (line.gone) group.append(make("path", { class: "gone", d: path(line.gone, x, px, py, log, x0, x1) }));
    if (line.mean) group.append(make("path", { class: "mean", d: path(line.mean, x, px, py, log, x0, x1) }));
    if (line.dots) {
      if (!line.mean) group.append(make("path", { class: line.dashed ? "mean dashed" : "mean", d: path(line.dots, x, px, py, log, x0, x1) }));
      line.dots.value.forEach((v, i) => {
        const at = line.dots[x][i];
        if (v === null || at < x0 || at > x1) return;
        if (line.low && line.low[i] !== null)
          group.append(make("path", { class: "whisker", d: `M${px(at) - 3} ${py(line.low[i])}h6m-3 0V${py(line.high[i])}m-3 0h6` }));
        if (line.dots.value.length <= 40) group.append(make("circle", { class: "dot", cx: px(at), cy: py(v), r: 3 }));
      });
    }
    if (line.raw) line.raw.value.forEach((v, i) => {
      if (v === null && line.raw[x][i] >= x0 && line.raw[x][i] <= x1)
        group.append(make("path", { class: "nan", d: `M${px(line.raw[x][i]) - 4} ${top}h8l-4 7z` }, make("title", {}, "not a number")));
    });
    clip.append(group);
  }
  svg.append(clip);
  one.hair = make("g", {});
  svg.append(one.hair);
}

/** Checkpoint flags under an axis, at least 8 pixels apart. */
function flags(places, y) {
  let text = "", last = -Infinity;
  for (const at of places) if (at - last >= 8) { text += `M${at - 3} ${y}h6l-3 -5z`; last = at; }
  return make("g", { class: "m-checkpoint" }, make("path", { class: "flag", d: text }, make("title", {}, "checkpoints")));
}

function path(part, x, px, py, log, x0, x1) {
  let text = "", pen = false;
  for (let i = 0; i < part.value.length; i++) {
    const v = part.value[i], at = part[x][i];
    if (v === null || (log && v <= 0) || at < x0 || at > x1) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${px(at).toFixed(1)} ${py(v).toFixed(1)}`;
    pen = true;
  }
  return text;
}

// --- pointing and zooming ---

function nearest(list, value) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (list[mid] < value) low = mid; else high = mid; }
  return high < 0 || Math.abs(list[low] - value) < Math.abs(list[high] - value) ? low : high;
}

function point(value) {
  for (const one of charts) {
    if (!one.place || !one.hair || one.options.clock) continue;
    const { x, px, left, width, right } = one.place, at = px(value);
    one.hair.replaceChildren();
    one.read.textContent = "";
    if (value === null || at < left || at > width - right) continue;
    one.hair.append(make("line", { class: "hair", x1: at, x2: at, y1: 8, y2: (one.options.height || 180) - 22 }));
    const format = one.options.format || short;
    const labels = one.options.lines.map((line) => {
      const part = line.raw || line.dots || line.mean;
      if (!part || !part.value.length) return null;
      const i = nearest(part[x], value), v = part.value[i];
      return `${line.label ? line.label + " " : ""}${v === null ? "not a number" : format(v)}`;
    }).filter(Boolean);
    one.read.textContent = `${x === "step" ? "step " + whole(value) : clock(value, true)}   ${labels.slice(0, 4).join("   ")}`;
  }
}

function listen(one) {
  const where = (event) => {
    const { x0, x1, left, width, right } = one.place, box = one.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * width / box.width - left) / (width - left - right);
    return x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
  };
  let from = null;
  one.svg.addEventListener("pointermove", (event) => {
    if (!one.place) return;
    point(where(event));
    if (from !== null) {
      const a = one.place.px(from), b = one.place.px(where(event));
      one.hair.append(make("rect", { class: "brush", x: Math.min(a, b), width: Math.abs(a - b), y: 10, height: (one.options.height || 180) - 32 }));
    }
  });
  one.svg.addEventListener("pointerleave", () => { point(null); from = null; });
  one.svg.addEventListener("pointerdown", (event) => { if (one.place && event.pointerType === "mouse") from = where(event); });
  one.svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const to = where(event), [low, high] = from < to ? [from, to] : [to, from];
    from = null;
    if (high - low > (one.place.x1 - one.place.x0) / 100) zoom(low, high, one.place.x);
  });
  one.svg.addEventListener("dblclick", () => zoom(null));
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

// --- parts of the page ---

const SHARES = [
  ["productive", "kept steps"], ["data_wait", "waiting for data"], ["compile", "compiling"], ["straggler", "waiting for slow ranks"],
  ["shrunk_batch", "missing ranks"], ["lost", "lost or skipped steps"], ["evaluation", "evaluation"], ["checkpoint", "checkpoints"],
  ["init", "starting up"], ["restart", "restarting"], ["re_mesh", "continuing without lost ranks"], ["other", "other"],
];

function head(run) {
  const facts = run.facts, labels = [];
  if (facts.parameters) labels.push(short(facts.parameters) + " parameters");
  if (facts.ranks) labels.push(`${many(facts.ranks, "rank")} on ${facts.device}` + (facts.ranks_now === facts.ranks ? "" : `, resumed on ${whole(facts.ranks_now)}`));
  if (facts.backend && facts.backend !== "none") labels.push(facts.backend);
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  const passed = run.began_s && run.last_s ? run.last_s - run.began_s : null;
  return [
    make("div", { class: "title" }, make("h1", {}, run.name), make("span", { class: "pill " + run.state.word, title: run.state.reason }, run.state.word),
      make("span", { class: "facts" }, labels.join(" · "))),
    run.state.word === "silent" || run.state.word === "stopped" ? make("div", { class: "facts" }, run.state.reason) : null,
    make("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share) }, make("i", { vars: { width: 100 * share + "%" } })),
    make("div", { class: "under" }, make("span", {}, `step ${whole(run.step)}${run.steps ? " of " + whole(run.steps) : ""}`),
      make("span", {}, passed === null ? "" : "took " + span(passed) + (run.left_s === null ? "" : " so far")),
      make("span", {}, run.left_s === null ? (run.last_s ? "last event " + clock(run.last_s, true) : "") : span(run.left_s) + " left")),
    make("div", { class: "tiles" },
      tile("loss", digits(run.loss ?? NaN, 4), run.heldout_loss === null ? "nats per token" : "held-out " + digits(run.heldout_loss, 4), run.loss),
      tile("tokens per second", short(run.tokens_per_s), run.step_s ? span(run.step_s) + " a step" : "", run.tokens_per_s),
      run.mfu === null ? null : tile("model FLOPs used", percent(run.mfu), "of the dense bf16 peak", run.mfu),
      tile("tokens seen", short(run.tokens), "", run.tokens),
      tile("goodput", percent(run.goodput), "of all time in kept steps", run.goodput),
      tile("waiting for data", percent(run.data_wait), "of a step", run.data_wait),
      run.memory_bytes === null ? null : tile("memory", bytes(run.memory_bytes), "most on rank 0", run.memory_bytes),
      tile("interruptions", String(run.restarts + run.lost_ranks), `${many(run.restarts, "restart")}, ${many(run.lost_ranks, "rank")} lost`, 0)),
  ].filter(Boolean);
}

function tile(label, value, below, known) {
  const empty = known === null || known === undefined, [number, ...unit] = String(empty ? "–" : value).split(" ");
  return make("div", { class: "tile" }, make("span", {}, label), make("b", {}, number, unit.length ? make("small", {}, unit.join(" ")) : null), make("em", {}, below));
}

function section(title, ...inner) {
  const kept = inner.filter(Boolean);
  return kept.length ? [make("h2", {}, title), make("div", { class: "grid" }, ...kept)] : [];
}

const colour = (index) => `var(--c${index % COLOURS})`;

/** One curve of each run; the colour is the run's where there are several, else the curve's. */
function curveChart(runs, name, options) {
  const have = runs.filter((run) => run.curves[name]);
  if (!have.length) return null;
  const lines = have.map((run) => {
    const part = run.curves[name], label = runs.length > 1 ? run.name : "";
    const paint = runs.length > 1 ? colour(runs.indexOf(run)) : options.colour;
    return part.mean ? { label, colour: paint, raw: part, mean: part.mean } : { label, colour: paint, dots: part, low: part.low, high: part.high };
  });
  return chart({ ...options, lines, marks: runs.length === 1 ? runs[0].marks : [] });
}

function lossChart(runs) {
  const lines = [], labels = [];
  runs.forEach((run, i) => {
    const paint = colour(runs.length > 1 ? i : 0), name = runs.length > 1 ? run.name : "training";
    const { loss, heldout, lost_loss: gone } = run.curves;
    if (loss) lines.push({ label: name, colour: paint, raw: loss, mean: loss.mean, gone });
    if (heldout) lines.push({ label: "held-out", colour: runs.length > 1 ? paint : colour(2), dots: heldout, dashed: runs.length > 1 });
    labels.push({ label: runs.length > 1 ? run.name : "training: every step and the mean", colour: paint });
    if (runs.length === 1 && heldout) labels.push({ label: "held-out", colour: colour(2) });
    if (runs.length === 1 && gone) labels.push({ label: "lost: repeated after a restart", colour: "var(--lost)" });
  });
  if (!lines.length) return null;
  if (runs.length > 1) labels.push({ label: "dashed: held-out", colour: "transparent" });
  return chart({ title: "Loss, nats per token", wide: true, height: 290, log: "wide", lines, legend: labels, marks: runs.length === 1 ? runs[0].marks : [],
    checkpoints: runs.length === 1 ? runs[0].checkpoints_at : null });
}

function scoreCharts(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.scores)))];
  const found = names.map((task) => {
    const lines = runs.filter((run) => run.scores[task]).map((run) => {
      const rows = run.scores[task], dots = { step: [], time_s: [], value: [] };
      rows.forEach((row) => { dots.step.push(row.step); dots.time_s.push(row.time_s); dots.value.push(row.pass_at_1); });
      const last = rows[rows.length - 1];
      return { label: runs.length > 1 ? run.name : `${last.passed} of ${last.total} last;`, colour: colour(runs.length > 1 ? runs.indexOf(run) : 2),
        dots, low: rows.map((row) => row.low), high: rows.map((row) => row.high) };
    });
    return chart({ title: `${task}: pass@1 and its 95 % interval`, lines, format: percent, fromZero: true, height: 200 });
  });
  const measured = [...new Set(runs.flatMap((run) => Object.keys(run.curves).filter((name) => name.includes(": "))))];
  return [...found, ...measured.map((name) => curveChart(runs, name, { title: name.replace("bits-per-byte: bits_per_byte", "Bits per byte of held-out code"), colour: colour(4), height: 200 }))];
}

function timeCard(runs) {
  const box = make("div", { class: "card wide" });
  box.append(make("h3", {}, "Where the time went"));
  for (const run of runs) {
    const total = Object.values(run.spent_s).reduce((a, b) => a + b, 0);
    if (!total) continue;
    if (runs.length > 1) box.append(make("div", { class: "legend" }, `${run.name}: goodput ${percent(run.goodput)} of ${span(total)}`));
    box.append(make("div", { class: "shares", role: "img", "aria-label": `goodput ${percent(run.goodput)}` }, ...SHARES.filter(([key]) => run.spent_s[key] > 0).map(([key, labels]) =>
      make("i", { vars: { "--k": `var(--${key})`, width: 100 * run.spent_s[key] / total + "%" }, title: `${labels}: ${span(run.spent_s[key])}, ${percent(run.spent_s[key] / total)}` }))));
    if (runs.length === 1) box.append(legend(SHARES.filter(([key]) => run.spent_s[key] / total >= 5e-5).map(([key, labels]) =>
      ({ label: `${labels} ${percent(run.spent_s[key] / total)} (${span(run.spent_s[key])})`, colour: `var(--${key})`, box: true }))));
  }
  if (runs.length > 1) box.append(legend(SHARES.map(([key, labels]) => ({ label: labels, colour: `var(--${key})`, box: true }))));
  return box;
}

function timelineCard(run) {
  if (!run.clock.shares) return null;
  const box = make("div", { class: "card wide" });
  box.append(make("h3", {}, "Timeline"), make("div", { class: "legend" },
    make("span", {}, "each column is an interval of time; red flags: lost ranks, restarts, spikes; violet flags: checkpoints")));
  const svg = make("svg", { height: 130, role: "img", "aria-label": "shares of time over the run" });
  box.append(svg);
  charts.push({ options: { clock: true }, box, svg, read: make("span"), paint: () => drawTimeline(svg, run) });
  return box;
}

function drawTimeline(svg, run) {
  const { began_s: began, ended_s: ended, shares } = run.clock, width = svg.clientWidth || 1100, top = 14, bottom = 108;
  const parts = shares.productive.length, wide = width / parts;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} 130`);
  for (const [key, labels] of SHARES) {
    // One path per class; columns are stacked.
    let text = "";
    shares[key].forEach((share, i) => {
      if (share < 0.002) return;
      let below = 0;
      for (const [other] of SHARES) { if (other === key) break; below += shares[other][i]; }
      const y = bottom - (below + share) * (bottom - top);
      text += `M${(i * wide).toFixed(1)} ${y.toFixed(1)}h${Math.max(0.5, wide - (wide > 4 ? 1 : 0)).toFixed(1)}v${(share * (bottom - top)).toFixed(1)}h${-Math.max(0.5, wide - (wide > 4 ? 1 : 0)).toFixed(1)}z`;
    });
    if (text) svg.append(make("path", { d: text, fill: `var(--${key})` }, make("title", {}, labels)));
  }
  for (const mark of run.marks) {
    const at = (mark.time_s - began) / (ended - began) * width;
    if (at < 0 || at > width) continue;
    svg.append(make("g", { class: "m-" + mark.what }, make("path", { class: "flag", d: `M${at - 4} 2h8l-4 9z` }, make("title", {}, `${clock(mark.time_s, true)}, step ${mark.step}: ${mark.text}`))));
  }
  svg.append(flags(run.checkpoints_at.time_s.map((t) => (t - began) / (ended - began) * width), bottom + 7));
  for (const t of clockTicks(began, ended, width / 90)) {
    const at = (t - began) / (ended - began) * width;
    svg.append(make("text", { x: at, y: 127, "text-anchor": at < 20 ? "start" : at > width - 20 ? "end" : "middle" }, tickClock(t, ended - began)));
  }
}

function notableCard(run) {
  const box = make("div", { class: "card wide" });
  if (run.unusual.length) box.append(eventList(run.unusual));
  else box.append(make("p", { class: "empty" }, "Nothing unusual so far."));
  if (run.history.length) box.append(make("details", {}, make("summary", {}, `history: ${many(run.history.length, "ordinary event")}`), eventList(run.history)));
  return box;
}

function eventList(entries) {
  return make("ul", { class: "notable" }, ...entries.map((entry) => {
    const steps = entry.last_step > entry.step ? `steps ${whole(entry.step)}–${whole(entry.last_step)}` : `step ${whole(entry.step)}`;
    const ranks = entry.num_ranks > 1 ? ` (${whole(entry.num_ranks)} ranks)` : entry.ranks[0] ? ` (rank ${entry.ranks[0]})` : "";
    const times = entry.times > 1 && entry.num_ranks < entry.times ? `, ${entry.times} times` : "";
    return make("li", { class: "m-" + entry.weight }, make("i"), make("time", {}, clock(entry.time_s, true)), make("span", { class: "at" }, steps), make("span", { class: "labels" }, entry.text + ranks + times));
  }));
}

/** A text field that keeps its text and the cursor when the page is drawn again. */
function searchBox(name, label) {
  return make("input", { type: "search", id: "search-" + name, placeholder: label, "aria-label": label, value: view[name],
    oninput: (event) => { view[name] = event.target.value; show(); const again = byId("search-" + name); again.focus(); again.setSelectionRange(again.value.length, again.value.length); } });
}

const SORT_KEYS = [(run) => run.name, (run) => run.state.word, (run) => run.step, (run) => run.loss, (run) => run.heldout_loss,
  (run) => run.tokens_per_s, (run) => run.mfu, (run) => run.goodput, (run) => run.left_s];

/** The runs whose name contains the searched text, by the chosen column; without one, newest first. */
function sortedRuns(runs) {
  const found = runs.filter((run) => run.name.toLowerCase().includes(view.search.toLowerCase()));
  if (view.sort === null) return found;
  const { column, down } = view.sort, key = SORT_KEYS[column];
  const order = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 : (a < b) === down ? 1 : -1;
  return found.sort((a, b) => order(key(a), key(b)));
}

function sortBy(column) {
  view.sort = view.sort && view.sort.column === column ? (view.sort.down ? null : { column, down: true }) : { column, down: false };
  show();
}

function runsTable(all) {
  const columns = ["run", "state", "step", "loss", "held-out loss", "tokens/s", "MFU", "goodput", "left"], runs = sortedRuns(all);
  const heading = (word, i) => {
    const sorted = view.sort && view.sort.column === i ? (view.sort.down ? "descending" : "ascending") : null;
    return make("th", { class: i > 1 ? "n" : null, "aria-sort": sorted }, make("button", { class: "sort", onclick: () => sortBy(i) }, word + (sorted ? (view.sort.down ? " ↓" : " ↑") : "")));
  };
  const rows = runs.map((run) => make("tr", {},
    make("td", {}, make("a", { href: "#" + encodeURIComponent(run.name) }, run.name)),
    make("td", {}, make("span", { class: "pill " + run.state.word, title: run.state.reason }, run.state.word)),
    ...[run.steps ? `${whole(run.step)} / ${whole(run.steps)}` : whole(run.step), run.loss === null ? "–" : digits(run.loss, 4), run.heldout_loss === null ? "–" : digits(run.heldout_loss, 4),
      short(run.tokens_per_s), percent(run.mfu), percent(run.goodput), span(run.left_s)].map((text) => make("td", { class: "n" }, text))));
  return make("div", { class: "card wide scroll" }, searchBox("search", "search runs"),
    make("table", {}, make("thead", {}, make("tr", {}, ...columns.map(heading))), make("tbody", {}, ...rows)));
}

/** Settings of one run; of several runs, those in which they differ. */
function settingsCard(runs) {
  const paths = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const value = (run, path) => path in run.settings ? String(run.settings[path]) : "–";
  const differ = (path) => new Set(runs.map((run) => value(run, path))).size > 1;
  const chosen = paths.filter((path) => (runs.length === 1 || differ(path)) && path.includes(view.settings));
  if (!paths.length) return null;
  const head = ["setting", ...(runs.length > 1 ? runs.map((run) => run.name) : ["value"])];
  const rows = chosen.map((path) => make("tr", {}, make("td", {}, make("code", {}, path)), ...runs.map((run) => make("td", {}, value(run, path)))));
  const title = runs.length > 1 ? `${many(chosen.length, "setting")} in which these runs differ` : many(chosen.length, "setting");
  return make("details", { class: "card wide scroll", id: "settings", open: view.open.settings ? "" : null, ontoggle: (event) => { view.open.settings = event.target.open; } },
    make("summary", {}, title), searchBox("settings", "search settings"),
    make("table", {}, make("thead", {}, make("tr", {}, ...head.map((word) => make("th", {}, word)))), make("tbody", {}, ...rows)));
}

function chartSections(runs) {
  const one = runs.length === 1 ? runs[0] : null;
  return [
    ...section("Learning", lossChart(runs),
      curveChart(runs, "grad_norm", { title: "Gradient norm", log: true, colour: colour(3) }),
      curveChart(runs, "lr", { title: "Learning rate", fromZero: true, colour: colour(7) })),
    ...section("Checkpoints, evaluated as they appear", ...scoreCharts(runs)),
    ...section("Speed",
      curveChart(runs, "tokens_per_s", { title: "Tokens per second", fromZero: true, steady: true, colour: colour(2) }),
      curveChart(runs, "mfu", { title: "Model FLOPs used, of the dense peak", fromZero: true, steady: true, format: percent, colour: colour(0) }),
      curveChart(runs, "data_wait", { title: "Waiting for data, share of a step", fromZero: true, most: 0.01, format: percent, colour: colour(4) }),
      curveChart(runs, "memory_bytes", { title: "Memory of rank 0", fromZero: true, unit: 2 ** 30, format: bytes, colour: colour(6) })),
    ...section("Time", timeCard(runs), one ? timelineCard(one) : null),
    ...(one ? section("Unusual", notableCard(one)) : []),
    ...section("Settings", settingsCard(runs)),
  ];
}

// --- the page ---

function show() {
  const data = view.data, content = byId("dashboard");
  charts.length = 0;
  byId("folder").textContent = data.folder;
  for (const axis of ["step", "time"]) byId("by-" + axis).setAttribute("aria-pressed", String(view.axis === axis));
  const inner = [];
  if (data.runs.length > 1) {
    const names = [null, ...data.runs.slice(0, 20).map((run) => run.name)];
    inner.push(make("nav", {}, ...names.map((name) => make("button", { "aria-pressed": String(view.run === name), onclick: () => { location.hash = name === null ? "" : encodeURIComponent(name); } }, name === null ? `all ${data.runs.length} runs` : name))));
  }
  const chosen = data.runs.length > 1 && view.run === null ? data.details : data.details.filter((run) => view.run === null || run.name === view.run);
  if (!data.runs.length)
    inner.push(make("p", { class: "empty" }, "No runs here yet. A run appears as soon as it starts: ", make("code", {}, "lakh train laptop --out " + data.folder)));
  else if (!chosen.length) {
    const known = data.runs.some((run) => run.name === view.run);
    inner.push(make("p", { class: "empty" }, known ? "reading …" : `There is no run ${view.run} here.`));
  }
  else {
    if (data.runs.length > 1 && view.run === null) inner.push(runsTable(data.runs));
    else inner.push(...head(chosen[0]));
    for (const run of chosen.filter((r) => r.read.bytes < r.read.of_bytes - 65536))
      inner.push(make("p", { class: "hint" }, `reading ${run.name}: ${percent(run.read.bytes / run.read.of_bytes)} of ${digits(run.read.of_bytes / 1e6, 3)} MB so far`));
    if (view.run === null && chosen.length < data.runs.length)
      inner.push(make("p", { class: "hint" }, `showing the curves of the ${chosen.length} most recent of ${data.runs.length} runs; choose any other in the table`));
    if (view.window) inner.push(make("p", { class: "hint" }, "zoomed in; ", make("button", { id: "whole", onclick: () => zoom(null) }, "show all")));
    inner.push(...chartSections(chosen));
  }
  content.replaceChildren(...inner);
  for (const one of charts) { if (one.paint) one.paint(); else { draw(one); listen(one); } }
  const read = chosen.map((run) => run.read);
  const count = read.reduce((sum, r) => sum + r.events, 0), torn = read.reduce((sum, r) => sum + r.unreadable_lines, 0);
  byId("foot").textContent = `${whole(count)} events read${torn ? `, ${whole(torn)} lines unreadable` : ""} · drag over a chart to zoom, double click to zoom out · lakh ${data.lakh}`;
  const running = chosen.length === 1 ? chosen[0] : null;
  document.title = running && running.step ? `${running.name} · step ${whole(running.step)}${running.loss === null ? "" : " · loss " + digits(running.loss, 4)}` : "lakh dashboard";
}

function choose() {
  let name = null;
  try { name = decodeURIComponent(location.hash.slice(1)) || null; } catch { /* malformed: show all runs */ }
  if (view.data && view.data.runs.length === 1) name = view.data.runs[0].name;
  view.run = name;
  view.window = null;
  view.etag = null;
}

async function poll(once) {
  if (saved) return;
  const query = new URLSearchParams();
  if (view.run !== null) query.append("run", view.run);
  if (view.window && view.window.step) { query.append("from", view.window.step[0]); query.append("to", view.window.step[1]); }
  try {
    const response = await fetch("data.json?" + query, { headers: view.etag ? { "If-None-Match": view.etag } : {}, cache: "no-store" });
    if (response.status !== 304) {
      if (!response.ok) throw new Error(String(response.status));
      view.etag = response.headers.get("ETag");
      view.data = await response.json();
      if (!document.querySelector("svg:hover") || once || !view.drawn) { show(); view.drawn = true; }
    }
    view.updated = Date.now();
  } catch (error) {
    if (!(error instanceof TypeError) && !/^\d+$/.test(error.message)) throw error;
  }
  alive();
}

function alive() {
  const word = byId("alive"), quiet = !saved && Date.now() - view.updated > 4 * POLL_MS;
  word.className = quiet ? "lost" : "";
  word.textContent = saved ? "saved " + clock(saved.time_s, true) : quiet ? "no connection to the server" : "live";
}

byId("by-step").addEventListener("click", () => { view.axis = "step"; show(); });
byId("by-time").addEventListener("click", () => { view.axis = "time"; show(); });
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
addEventListener("hashchange", () => { choose(); if (view.data) show(); poll(true); });
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => view.data && show(), 120); });

choose();
if (saved) { show(); alive(); }
else poll(true).then(() => setInterval(() => document.hidden || poll(false), POLL_MS));
