"use strict";
// The page over the data of data.json; charts.js draws the lines. Talks to its own server only, and to none in a saved page.
// Everything that comes from a run is inserted as text, never as markup.

const saved = JSON.parse(document.getElementById("data").textContent || "null");
const view = { run: null, page: "overview", axis: "step", window: null, data: saved, etag: null, updated: 0, search: "", state: "all", tag: "all", chosen: [], sort: null, settings: "", open: {},
  scale: "auto", smoothing: "mean", hidden: new Set(), compared: new Set(), corpus: {}, evaluation: null, samples: null, verdict: "all" };
const POLL_MS = 2000;
const COLOURS = 8, MAX_COMPARED = 32;  // as many as the server sends

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

// --- parts of the page ---

const SHARES = [
  ["productive", "steps that count"], ["data_wait", "waiting for data"], ["compile", "compiling"], ["straggler", "waiting for slow ranks"],
  ["shrunk_batch", "missing ranks"], ["lost", "lost or skipped steps"], ["evaluation", "evaluation"], ["checkpoint", "checkpoints"],
  ["init", "starting up"], ["restart", "restarting"], ["re_mesh", "continuing without lost ranks"], ["other", "other"],
];

function head(run) {
  const facts = run.facts, labels = [];
  if (facts.parameters) labels.push(short(facts.parameters) + " parameters");
  if (facts.ranks) labels.push(`${many(facts.ranks, "rank")} on ${facts.device}` + (facts.ranks_now === facts.ranks ? "" : `, resumed on ${whole(facts.ranks_now)}`));
  if (facts.backend && facts.backend !== "none") labels.push(facts.backend);
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  const passed = run.began_s && run.last_s ? run.last_s - run.began_s : null, work = Object.values(run.spent_s).reduce((a, b) => a + b, 0);
  const took = passed > 1.2 * work ? `${span(work)} of work within ${span(passed)}` : "took " + span(passed);  // it was stopped for a while
  return [
    make("div", { class: "title" }, make("h1", {}, run.name), make("span", { class: "pill " + run.state.word, title: run.state.reason }, run.state.word),
      ...tagButtons(run), make("span", { class: "facts" }, labels.join(" · "))),
    ["silent", "stopped", "unreadable"].includes(run.state.word) ? make("div", { class: "facts" }, run.state.reason) : null,
    ...run.read.unreadable_files.filter((text) => !run.state.reason.startsWith(text)).map((text) => make("div", { class: "facts" }, text)),
    make("div", { class: "progress", role: "progressbar", "aria-label": "steps done", "aria-valuenow": Math.round(100 * share) }, make("i", { vars: { width: 100 * share + "%" } })),
    make("div", { class: "under" }, make("span", {}, `step ${whole(run.step)}${run.steps ? " of " + whole(run.steps) : ""}`),
      make("span", {}, passed === null ? "" : took + (run.left_s === null ? "" : " so far")),
      make("span", {}, run.left_s === null ? (run.last_s ? "last event " + clock(run.last_s, true) : "") : span(run.left_s) + " left")),
    make("div", { class: "tiles" },
      tile("loss", digits(run.loss ?? NaN, 4), run.heldout_loss === null ? "nats per token" : `held-out loss ${digits(run.heldout_loss, 4)}`, run.loss),
      tile("tokens per second", short(run.tokens_per_s), "", run.tokens_per_s),
      tile("step time", span(run.step_s), run.predicted && run.predicted.step_s ? "predicted " + span(run.predicted.step_s) : "median of the last steps", run.step_s),
      run.mfu === null ? null : tile("model FLOPs used (MFU)", percent(run.mfu), "of the dense bf16 peak", run.mfu),
      tile("tokens seen", short(run.tokens), "", run.tokens),
      tile("goodput", percent(run.goodput), "of the time in steps that count", run.goodput),
      tile("waiting for data", percent(run.data_wait), "of the step time", run.data_wait),
      run.memory_bytes === null ? null : tile("memory", bytes(run.memory_bytes), "most on rank 0", run.memory_bytes),
      tile("interruptions", String(run.restarts + run.losses), `${many(run.restarts, "restart")}; ranks lost ${many(run.losses, "time")}` + (run.lost_ranks ? `, ${whole(run.lost_ranks)} still missing` : ""), 0)),
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
    const common = { label, colour: paint, key: label };
    return part.mean ? { ...common, raw: part, mean: part.mean } : { ...common, dots: part, low: part.low, high: part.high };
  });
  return chart({ ...options, lines, marks: runs.length === 1 ? runs[0].marks : [] });
}

function lossChart(runs) {
  const lines = [], labels = [];
  runs.forEach((run, i) => {
    const paint = colour(runs.length > 1 ? i : 0), name = runs.length > 1 ? run.name : "training";
    const { loss, heldout, lost_loss: gone } = run.curves;
    if (loss) lines.push({ label: name, key: name, colour: paint, raw: loss, mean: loss.mean, gone: runs.length > 1 ? gone : null });
    if (gone && runs.length === 1) lines.push({ label: "lost", key: "lost", colour: "var(--lost)", gone });
    if (heldout) lines.push({ label: "held-out", key: runs.length > 1 ? name : "held-out", colour: runs.length > 1 ? paint : colour(2), dots: heldout, dashed: runs.length > 1 });
    labels.push({ label: runs.length > 1 ? run.name : "training: every step and the mean", key: name, colour: paint });
    if (runs.length === 1 && heldout) labels.push({ label: "held-out", key: "held-out", colour: colour(2) });
    if (runs.length === 1 && gone) labels.push({ label: "lost: repeated after a restart", key: "lost", colour: "var(--lost)" });
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
      return { label: runs.length > 1 ? run.name : `${last.passed} of ${last.total} last;`, key: runs.length > 1 ? run.name : null, colour: colour(runs.length > 1 ? runs.indexOf(run) : 2),
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
    make("span", {}, "each column is an interval of time; red flags: lost ranks, restarts, spikes; violet flags: checkpoints; white: it did not run")));
  const svg = make("svg", { height: 130, role: "img", "aria-label": "shares of time over the run" });
  box.append(svg);
  charts.push({ paint: () => drawTimeline(svg, run) });
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

/** Checkpoint flags under an axis, at least 8 pixels apart. */
function flags(places, y) {
  let text = "", last = -Infinity;
  for (const at of places) if (at - last >= 8) { text += `M${at - 3} ${y}h6l-3 -5z`; last = at; }
  return make("g", { class: "m-checkpoint" }, make("path", { class: "flag", d: text }, make("title", {}, "checkpoints")));
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

/** The runs whose name or tags contain the searched words, by the chosen column; without one, newest first. */
function sortedRuns(runs) {
  const words = view.search.toLowerCase().split(/\s+/), texts = (run) => [run.name, ...run.tags].map((text) => text.toLowerCase());
  const found = runs.filter((run) => words.every((word) => texts(run).some((text) => text.includes(word))) &&
    (view.state === "all" || run.state.word === view.state) && (view.tag === "all" || run.tags.includes(view.tag)));
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
  const tags = ["all", ...[...new Set(all.flatMap((run) => run.tags))].sort()];
  if (!tags.includes(view.tag)) view.tag = "all";  // the last run with it is gone
  const columns = ["run", "state", "step", "loss", "held-out loss", "tokens/s", "MFU", "goodput", "time left"], runs = sortedRuns(all);
  const heading = (word, i) => {
    const sorted = view.sort && view.sort.column === i ? (view.sort.down ? "descending" : "ascending") : null;
    return make("th", { class: i > 1 ? "n" : null, "aria-sort": sorted }, make("button", { class: "sort", onclick: () => sortBy(i) }, word + (sorted ? (view.sort.down ? " ↓" : " ↑") : "")));
  };
  const rows = runs.map((run) => make("tr", {},
    make("td", {}, make("input", { type: "checkbox", "aria-label": "compare " + run.name, checked: view.compared.has(run.name) ? "" : null, onchange: (event) => { view.compared[event.target.checked ? "add" : "delete"](run.name); show(); } }),
      " ", make("a", { href: "#" + encodeURIComponent(run.name) }, run.name), ...tagButtons(run), sparkline(run)),
    make("td", {}, make("span", { class: "pill " + run.state.word, title: run.state.reason }, run.state.word)),
    ...[run.steps ? `${whole(run.step)} / ${whole(run.steps)}` : whole(run.step), run.loss === null ? "–" : digits(run.loss, 4), run.heldout_loss === null ? "–" : digits(run.heldout_loss, 4),
      short(run.tokens_per_s), percent(run.mfu), percent(run.goodput), span(run.left_s)].map((text) => make("td", { class: "n" }, text))));
  const states = ["all", ...new Set(all.map((run) => run.state.word))], compared = all.filter((run) => view.compared.has(run.name)).map((run) => run.name);
  const choice = (name, words) => make("label", {}, ` ${name} `, make("select", { id: name, onchange: (event) => { view[name] = event.target.value; show(); } }, ...words.map((word) => make("option", { selected: word === view[name] ? "" : null }, word))));
  const compare = make("button", { id: "compare", disabled: compared.length < 2 ? "" : null, onclick: () => { location.hash = compared.map(encodeURIComponent).join("|"); } }, `compare ${compared.length < 2 ? "the chosen runs" : many(compared.length, "run")}`);
  const shown = make("button", { id: "compare-shown", disabled: runs.length < 2 ? "" : null, onclick: () => { location.hash = runs.slice(0, MAX_COMPARED).map((run) => encodeURIComponent(run.name)).join("|"); } }, `compare ${runs.length > MAX_COMPARED ? `the first ${MAX_COMPARED}` : "all"} shown`);
  return make("div", { class: "card wide scroll" }, searchBox("search", "search runs and tags"), choice("state", states), tags.length > 1 ? choice("tag", tags) : null, " ", compare, " ", shown,
    make("table", {}, make("thead", {}, make("tr", {}, ...columns.map(heading))), make("tbody", {}, ...rows)));
}

/** The tags of a run; each filters the table of runs. */
function tagButtons(run) {
  return run.tags.map((tag) => make("button", { class: "tag", title: "Show the runs with this tag", onclick: () => { view.tag = tag; if (view.run === null && !view.chosen.length) show(); else location.hash = ""; } }, tag));
}

/** The loss of a run as a small line, on a scale of its own. */
function sparkline(run) {
  const values = run.sparkline.filter((value) => value !== null);
  if (values.length < 2) return null;
  const low = Math.min(...values), range = Math.max(...values) - low || 1, last = values.length - 1;
  const path = values.map((value, i) => `${i ? "L" : "M"}${(80 * i / last).toFixed(1)} ${(17 - 15 * (value - low) / range).toFixed(1)}`).join("");
  return make("svg", { class: "sparkline", viewBox: "0 0 80 19", role: "img", "aria-label": `loss from ${digits(values[0], 4)} to ${digits(values[last], 4)}` }, make("path", { d: path }));
}

// --- evaluations: scores, and samples with their verdicts ---

function evaluationsCard(run) {
  if (!run.evaluations.length) return null;
  const columns = ["task", "checkpoint", "passed", "pass@1", "95 % interval", "verdicts", ""];
  const rows = run.evaluations.map((item) => {
    const open = view.evaluation === item.id;
    const toggle = make("button", { class: "samples", "aria-expanded": String(open), onclick: () => chooseEvaluation(run, open ? null : item) }, open ? "hide samples" : "samples");
    return make("tr", {}, make("td", { title: item.protocol }, item.task), make("td", {}, item.step === null ? "newest" : "step " + whole(item.step)),
      make("td", { class: "n" }, `${whole(item.passed)} of ${whole(item.total)}`), make("td", { class: "n" }, percent(item.pass_at_1)),
      make("td", { class: "n" }, item.low === null ? "–" : `${percent(item.low)} to ${percent(item.high)}`),
      make("td", {}, Object.entries(item.kinds).map(([kind, count]) => `${whole(count)} ${kind.replaceAll("_", " ")}`).join(", ")), make("td", {}, toggle));
  });
  return make("div", { class: "card wide scroll", id: "evaluations" },
    make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((word, i) => make("th", { class: i > 1 && i < 5 ? "n" : null }, word)))), make("tbody", {}, ...rows)),
    run.evaluations.some((item) => item.id === view.evaluation) ? samplesList() : null);
}

function samplesList() {
  if (!view.samples) return make("p", { class: "hint" }, "reading …");
  const kinds = ["all", ...new Set(view.samples.map((sample) => sample.kind))];
  const chosen = view.samples.filter((sample) => view.verdict === "all" || sample.kind === view.verdict);
  const filter = make("span", { class: "group", role: "group", "aria-label": "Verdict" }, ...kinds.map((kind) =>
    make("button", { "aria-pressed": String(view.verdict === kind), onclick: () => { view.verdict = kind; show(); } }, kind.replaceAll("_", " "))));
  return make("div", { class: "samples" }, filter, ...chosen.map((sample) => {
    const key = "sample " + view.samples.indexOf(sample);
    return make("details", { open: view.open[key] ? "" : null, ontoggle: (event) => { view.open[key] = event.target.open; } },
      make("summary", {}, make("span", { class: "pill " + (sample.kind === "passed" ? "passed" : "failed") }, sample.kind.replaceAll("_", " ") || "no verdict"),
        ` ${sample.task_id} `, make("small", {}, sample.detail.slice(0, 200))),
      make("pre", {}, sample.text), sample.detail.length > 200 ? make("pre", {}, sample.detail) : null);
  }));
}

async function chooseEvaluation(run, item) {
  view.evaluation = item ? item.id : null;
  view.samples = item && item.samples ? item.samples : null;
  view.verdict = "all";
  for (const key of Object.keys(view.open)) if (key.startsWith("sample ")) delete view.open[key];
  show();
  if (!item || view.samples) return;
  let found = [];
  if (!saved) {
    const response = await fetch("samples.json?" + new URLSearchParams({ run: run.name, evaluation: item.id }), { cache: "no-store" }).catch(() => null);
    if (response && response.ok) found = (await response.json()).samples;
  }
  if (view.evaluation === item.id) { view.samples = found; show(); }
}

// --- training data: from raw files to tokens ---

const megabytes = (value) => !value ? "" : value < 1e4 ? whole(value) + " bytes" : digits(value / 1e6, 3) + " MB";

function dataCard(run) {
  if (!run.training_data) return null;
  const { tokens, corpus } = run.training_data, rows = [];
  const row = (label, count, size, share, kind) => rows.push(make("tr", { class: kind }, make("td", {}, label), make("td", { class: "n" }, whole(count)), make("td", { class: "n" }, size),
    make("td", { class: "bar" }, make("i", { vars: { width: 100 * Math.min(1, share || 0) + "%" } }))));
  if (corpus) {
    row("files read", corpus.read, megabytes(corpus.bytes_in), 1, "kept");
    for (const [reason, count] of Object.entries(corpus.dropped)) row("dropped: " + reason.replaceAll("-", " "), count, megabytes(corpus.dropped_bytes[reason]), count / corpus.read, "dropped");
    row("documents kept", corpus.kept, megabytes(corpus.bytes_out), corpus.kept / corpus.read, "kept");
  }
  for (const [name, split] of Object.entries(tokens.splits))
    row(`${name === "heldout" ? "held-out" : name} documents`, split.documents, short(split.tokens) + " tokens", corpus ? split.documents / corpus.read : 1, "kept");
  return make("div", { class: "card wide scroll", id: "training-data" },
    make("table", {}, make("thead", {}, make("tr", {}, ...["", "files", "size", "share of files"].map((word, i) => make("th", { class: i === 1 || i === 2 ? "n" : null }, word)))), make("tbody", {}, ...rows)),
    corpus ? null : make("p", { class: "hint" }, "The corpus is not beside the token set, so only the tokens are known."),
    corpus && corpus.redactions.length ? make("details", { open: view.open.redactions ? "" : null, ontoggle: (event) => { view.open.redactions = event.target.open; } },
      make("summary", {}, "lines before and after redaction"), ...corpus.redactions.map((item) => make("div", {}, make("small", {}, item.place), make("pre", {}, `- ${item.before}\n+ ${item.after}`)))) : null);
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

/** Measured step time, and what the planner predicted when the run started. */
function stepTimeChart(runs) {
  const options = { title: "Step time, measured and predicted", height: 134, fromZero: true, steady: true, format: span, colour: colour(5) };
  if (runs.length > 1) return curveChart(runs, "step_s", { ...options, title: "Step time", height: 180 });
  const run = runs[0], part = run.curves.step_s, predicted = run.predicted;
  if (!part) return null;
  const ends = (list) => [list[0], list[list.length - 1]], twice = (value) => [value, value];
  const lines = [{ label: "measured", key: "step time", colour: options.colour, raw: part, mean: part.mean }], labels = [{ label: "measured: every step and the mean", key: "step time", colour: options.colour }];
  if (predicted && predicted.step_s) {
    lines.push({ label: "predicted", key: "predicted", colour: colour(1), dashed: true, points: "predicted", dots: { step: ends(part.step), time_s: ends(part.time_s), value: twice(predicted.step_s) }, low: twice(predicted.low_s), high: twice(predicted.high_s) });
    labels.push({ label: "predicted, with its 80 % interval", key: "predicted", colour: colour(1) });
  }
  const box = chart({ ...options, lines, legend: labels, marks: run.marks });
  box.id = "step-time";
  if (predicted) box.append(make("p", { class: "hint" }, predictionText(run, predicted)));
  return box;
}

function predictionText(run, predicted) {
  if (!predicted.step_s) return `no prediction: ${predicted.basis}`;
  const ratio = run.step_s / predicted.step_s - 1, inside = run.step_s >= predicted.low_s && run.step_s <= predicted.high_s;
  return `predicted ${span(predicted.step_s)} (80 %: ${span(predicted.low_s)} to ${span(predicted.high_s)}), measured ${span(run.step_s)}: ${percent(Math.abs(ratio))} ${ratio < 0 ? "shorter" : "longer"}, ` +
    `${inside ? "inside" : "outside"} the interval. ${predicted.basis}`;
}

const WORDS = {
  "step": "One update of the model: it reads a batch of text, predicts each next token, and its weights change a little.",
  "loss": "How badly the model predicts the next token of the training text: lower is better. In nats per token: 0 is perfect, and a random choice among 4,096 tokens gives 8.3.",
  "held-out loss": "The same on documents that the model never trains on. If it rises while the loss falls, the model memorises instead of learning.",
  "token": "A piece of text, about three or four characters of code.",
  "gradient norm": "How strongly a step pulls at the weights. Sudden jumps often come before a spike of the loss.",
  "learning rate": "How far each step moves the weights; it usually rises at first and then falls.",
  "rank": "One of the processes that train together, usually one per GPU.",
  "checkpoint": "A complete copy of the state of the run, from which it continues after a failure.",
  "goodput": "The share of all time that was spent in steps that count. Starting up, waiting, saving, failures and repeated steps are the rest.",
  "model FLOPs used (MFU)": "The arithmetic that the model needs, as a share of what the GPUs could do at their peak. Large runs reach 35 to 50 %.",
  "pass@1": "The share of programming problems that the model solves at the first attempt; its 95 % interval says how sure that is.",
};

function wordsCard() {
  return make("details", { class: "card wide", id: "words", open: view.open.words ? "" : null, ontoggle: (event) => { view.open.words = event.target.open; } },
    make("summary", {}, "what these words mean"), make("dl", {}, ...Object.entries(WORDS).flatMap(([word, text]) => [make("dt", {}, word), make("dd", {}, text)])));
}

function chartSections(runs) {
  const one = runs.length === 1 ? runs[0] : null, page = one ? runPage(one) : null;
  if (page) return page;
  return [
    ...section("Learning", lossChart(runs),
      curveChart(runs, "grad_norm", { title: "Gradient norm", log: true, colour: colour(3) }),
      curveChart(runs, "lr", { title: "Learning rate", fromZero: true, colour: colour(7) })),
    ...section("Scores of the checkpoints", ...scoreCharts(runs)),
    ...section("Speed",
      curveChart(runs, "tokens_per_s", { title: "Tokens per second", fromZero: true, steady: true, colour: colour(2) }),
      stepTimeChart(runs),
      curveChart(runs, "mfu", { title: "Model FLOPs used, of the dense peak", fromZero: true, steady: true, format: percent, colour: colour(0) }),
      curveChart(runs, "data_wait", { title: "Waiting for data, share of a step", fromZero: true, most: 0.01, format: percent, colour: colour(4) }),
      curveChart(runs, "memory_bytes", { title: "Memory of rank 0", fromZero: true, unit: 2 ** 30, format: bytes, colour: colour(6) })),
    ...section("Time", timeCard(runs)),
    ...(one ? section("Unusual", notableCard(one)) : []),
    ...section("Settings", settingsCard(runs)),
    ...section("Words", wordsCard()),
  ];
}

// --- the page ---

function show() {
  byId("tools").hidden = Boolean(saved);
  for (const one of document.querySelectorAll("header .of-charts")) one.hidden = !["overview", "evaluations"].includes(view.page);
  for (const [id, here] of [["to-runs", view.page !== "plan"], ["to-plan", view.page === "plan"]]) here ? byId(id).setAttribute("aria-current", "page") : byId(id).removeAttribute("aria-current");
  if (view.page === "plan" && !saved) { if (!byId("plan-answer")) planPage(); return; }
  const data = view.data, content = byId("dashboard");
  for (const one of charts.splice(0)) if (one.plot) one.plot.destroy();
  byId("folder").textContent = data.folder;
  for (const axis of ["step", "time"]) byId("by-" + axis).setAttribute("aria-pressed", String(view.axis === axis));
  byId("scale").value = view.scale;
  byId("smoothing").value = view.smoothing;
  const inner = [];
  if (data.runs.length > 1) {
    const names = [null, ...data.runs.slice(0, 20).map((run) => run.name)];
    inner.push(make("nav", {}, ...names.map((name) => make("button", { "aria-pressed": String(view.run === name), onclick: () => { location.hash = name === null ? "" : encodeURIComponent(name); } }, name === null ? `all ${data.runs.length} runs` : name))));
  }
  const chosen = view.chosen.length ? data.details.filter((run) => view.chosen.includes(run.name)) : data.runs.length > 1 && view.run === null ? data.details : data.details.filter((run) => view.run === null || run.name === view.run);
  if (!data.runs.length)
    inner.push(make("p", { class: "empty" }, "No runs here yet. A run appears as soon as it starts: ", make("code", {}, "lakh train laptop --out " + data.folder)));
  else if (!chosen.length) {
    const known = view.chosen.length || data.runs.some((run) => run.name === view.run);
    inner.push(make("p", { class: "empty" }, known ? "reading …" : `There is no run ${view.run} here.`));
  }
  else {
    if (data.runs.length > 1 && view.run === null) inner.push(runsTable(data.runs));
    else inner.push(...head(chosen[0]), pageLinks(chosen[0]));
    for (const run of chosen.filter((r) => r.read.bytes < r.read.of_bytes - 65536))
      inner.push(make("p", { class: "hint" }, `reading ${run.name}: ${percent(run.read.bytes / run.read.of_bytes)} of ${digits(run.read.of_bytes / 1e6, 3)} MB so far` +
        (run.read.is_preview ? `; until then the curves show some of the steps${run.read.has_extremes ? ", with every minimum and maximum" : ""}, and time, interruptions and ranks are those of the part that is read` : "")));
    if (view.chosen.length) inner.push(make("p", { class: "hint" }, `comparing ${many(chosen.length, "run")}; `, make("a", { href: "#" }, "all runs")));
    else if (view.run === null && chosen.length < data.runs.length)
      inner.push(make("p", { class: "hint" }, `showing the curves of the ${chosen.length} most recent of ${data.runs.length} runs; choose any other in the table`));
    if (view.window) inner.push(make("p", { class: "hint" }, "zoomed in; ", make("button", { id: "whole", onclick: () => zoom(null) }, "show all")));
    inner.push(...chartSections(chosen));
  }
  content.replaceChildren(...inner);
  for (const one of charts) { if (one.paint) one.paint(); else draw(one); }
  const read = chosen.map((run) => run.read);
  const count = read.reduce((sum, r) => sum + r.events, 0), torn = read.reduce((sum, r) => sum + r.unreadable_lines, 0);
  byId("foot").textContent = `${whole(count)} events read${torn ? `, ${whole(torn)} lines unreadable` : ""} · drag over a chart to zoom, double click to zoom out · lakh ${data.lakh}`;
  const running = chosen.length === 1 ? chosen[0] : null;
  document.title = running && running.step ? `${running.name} · step ${whole(running.step)}${running.loss === null ? "" : " · loss " + digits(running.loss, 4)}` : "lakh dashboard";
}

function choose() {
  const [encoded, page] = location.hash.slice(1).split("/");  // a name's own slashes are encoded
  let name = null, names = [];
  try { names = encoded.split("|").map(decodeURIComponent).filter(Boolean); } catch { /* malformed: show all runs */ }
  view.chosen = names.length > 1 ? names : [];
  if (names.length) view.compared = new Set(names.length > 1 ? names : view.compared);
  name = names.length === 1 ? names[0] : null;
  view.page = page in PAGES || (page === "plan" && !encoded) ? page : "overview";
  if (view.data && view.data.runs.length === 1) name = view.data.runs[0].name;
  view.run = name;
  view.evaluation = view.samples = null;
  view.window = null;
  view.etag = null;
}

async function poll(once) {
  if (saved) return;
  const query = new URLSearchParams();
  for (const name of view.run === null ? view.chosen : [view.run]) query.append("run", name);
  if (view.window && view.window.step) { query.append("from", view.window.step[0]); query.append("to", view.window.step[1]); }
  try {
    const response = await fetch("data.json?" + query, { headers: view.etag ? { "If-None-Match": view.etag } : {}, cache: "no-store" });
    if (response.status !== 304) {
      if (!response.ok) throw new Error(String(response.status));
      view.etag = response.headers.get("ETag");
      view.data = await response.json();
      if (!document.querySelector(".chart:hover") || once || !view.drawn) { show(); view.drawn = true; }
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
for (const name of ["scale", "smoothing"]) byId(name).addEventListener("change", (event) => { view[name] = event.target.value; show(); });
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  if (view.data) show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.data && show());
addEventListener("hashchange", () => { choose(); if (view.data) show(); poll(true); });
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => view.data && show(), 120); });

/** The server tells when something is new; without it, as behind a proxy that buffers, the page asks now and then. */
function follow() {
  const source = new EventSource("events");
  let due = false;
  source.addEventListener("message", () => {
    if (due) return;
    due = true;  // at most one request in half a second
    setTimeout(() => { due = false; document.hidden || poll(false); }, 500);
  });
  setInterval(() => document.hidden || (Date.now() - view.updated > 3 * POLL_MS && poll(false)), POLL_MS);
  document.addEventListener("visibilitychange", () => document.hidden || poll(false));
}

choose();
if (saved) { show(); alive(); }
else poll(true).then(follow);
