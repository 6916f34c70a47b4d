"use strict";
// The plan page: choose a model, a cluster and a batch, and see fit, time, cost and goodput. Everything here is simulated.

const plan = { choices: null, values: { model: "llama3-8b", cluster: "h100-pod", gpus: "256", sequence: "8192", batch: "512", tokens: "1e12" }, answer: null, asked: null, timer: 0, busy: false };
const PLAN_SLIDERS = { gpus: ["GPUs", 0, 17], batch: ["sequences per step", 0, 16], sequence: ["tokens per sequence", 9, 17] };  // powers of two

async function planPage() {
  const content = byId("dashboard");
  if (!plan.choices) {
    const response = await fetch("plan-choices.json", { cache: "no-store" });
    plan.choices = await response.json();
    for (const name of ["model", "cluster"]) if (!plan.choices[name + "s"].includes(plan.values[name])) plan.values[name] = plan.choices[name + "s"][0];
  }
  document.title = "plan · lakh dashboard";
  content.replaceChildren(make("h1", {}, "Plan"), make("p", { class: "hint" }, "What would a run cost? Every figure on this page is simulated by ", make("code", {}, "lakh plan"), "."),
    planForm(), make("div", { id: "plan-answer", "aria-live": "polite" }), ...acrossPart());
  byId("foot").textContent = "";
  if (plan.answer) showPlan(); else askPlan(0);
}

function planForm() {
  const select = (name, label) => make("label", {}, label, make("select", { id: "plan-" + name, onchange: (event) => setPlan(name, event.target.value) },
    ...plan.choices[name + "s"].map((word) => make("option", { selected: word === plan.values[name] ? "" : null }, word))));
  const slider = (name) => {
    const [label, low, high] = PLAN_SLIDERS[name], number = make("input", { type: "number", id: "plan-" + name, min: 1, value: plan.values[name], "aria-label": label });
    const range = make("input", { type: "range", min: low, max: high, step: 1, value: Math.round(Math.log2(plan.values[name])), "aria-label": label + ", slider" });
    number.addEventListener("input", () => { range.value = Math.round(Math.log2(number.value || 1)); setPlan(name, number.value); });
    range.addEventListener("input", () => { number.value = 2 ** range.value; setPlan(name, number.value); });
    return make("label", {}, label, number, range);
  };
  const tokens = make("input", { type: "text", id: "plan-tokens", inputmode: "numeric", value: plan.values.tokens, oninput: (event) => setPlan("tokens", event.target.value) });
  return make("form", { class: "card wide plan", onsubmit: (event) => event.preventDefault() }, select("model", "model"), select("cluster", "cluster"), slider("gpus"), slider("batch"), slider("sequence"),
    make("label", {}, "tokens of the run", tokens));
}

function setPlan(name, value) {
  plan.values[name] = value;
  clearTimeout(plan.timer);
  plan.timer = setTimeout(() => askPlan(), 400);
}

async function askPlan() {
  if (plan.asked) plan.asked.abort();
  const asked = plan.asked = new AbortController();
  byId("plan-answer").setAttribute("aria-busy", "true");
  try {
    const response = await fetch("plan.json?" + new URLSearchParams(plan.values), { signal: asked.signal, cache: "no-store" });
    plan.answer = response.ok ? await response.json() : { error: await response.text() };
  } catch (error) {
    if (error.name === "AbortError") return;  // a newer question
    plan.answer = { error: "no connection to the server" };
  }
  if (view.page === "plan") showPlan();
}

function showPlan() {
  const box = byId("plan-answer"), found = plan.answer;
  if (!box) return;
  box.removeAttribute("aria-busy");
  if (found.error) { box.replaceChildren(make("p", { class: "empty" }, found.error)); return; }
  const best = found.best, inner = [];
  if (!best) inner.push(make("p", { class: "empty" }, "No layout fits. " + (found.hint || found.why || "")));
  else {
    const bar = best.error_bar, goodput = found.goodput && !found.goodput.error ? found.goodput : null;
    const days = best.run_days && goodput ? best.run_days / goodput.goodput : null;
    inner.push(make("div", { class: "tiles" },
      tile("step", span(best.step_s), bar ? `80 %: ${span(bar.low_s)} to ${span(bar.high_s)}` : "", best.step_s),
      tile("memory of the fullest GPU", bytes(best.memory_bytes), "it fits", best.memory_bytes),
      best.run_days ? tile("run", span(86400 * best.run_days), days ? `${span(86400 * days)} with failures` : "", best.run_days) : null,
      best.run_usd ? tile("cost", "$" + short(best.run_usd), `$${digits(best.usd_per_step, 3)} a step`, best.run_usd) : tile("cost", "$" + digits(best.usd_per_step, 3), "a step", best.usd_per_step),
      goodput ? tile("goodput", percent(goodput.goodput), `${digits(goodput.failures_per_day, 2)} failures a day`, goodput.goodput) : null,
      tile("layouts searched", short(found.searched), "", found.searched)),
    make("p", { class: "hint" }, found.why), ...section("Pareto front of time, cost and memory", paretoChart(found.pareto, best), tableCard("pareto", ["GPUs", "layout", "step", "$ a step", "memory", "days", "$"],
      found.pareto.map((row) => [whole(row.gpus), row.name, span(row.step_s), digits(row.usd_per_step, 3), bytes(row.memory_bytes), row.run_days ? digits(row.run_days, 3) : "–", row.run_usd ? short(row.run_usd) : "–"]), [0, 2, 3, 4, 5, 6])));
  }
  inner.push(make("p", { class: "hint" }, "The same in a terminal: ", make("code", {}, found.command)));
  box.replaceChildren(...inner);
}

function paretoChart(rows, best) {
  const width = 1100, height = 220, left = 60, bottom = 190, right = 1080, top = 16;
  const xs = rows.map((row) => row.step_s), ys = rows.map((row) => row.memory_bytes / 2 ** 30);
  const scale = (values, from, to) => { const low = Math.min(...values), high = Math.max(...values); return (value) => high > low ? from + (value - low) / (high - low) * (to - from) : (from + to) / 2; };
  const x = scale(xs, left + 20, right - 20), y = scale(ys, bottom - 14, top + 10);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${many(rows.length, "layout")}: step time against memory` },
    make("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--line)" }), make("line", { x1: left, x2: left, y1: top, y2: bottom, stroke: "var(--line)" }),
    make("text", { x: right, y: bottom + 22, "text-anchor": "end" }, `step time: ${span(Math.min(...xs))} to ${span(Math.max(...xs))}`),
    make("text", { x: left, y: top - 4 }, `memory: ${digits(Math.min(...ys), 3)} to ${digits(Math.max(...ys), 3)} GiB`));
  for (const row of rows)
    svg.append(make("circle", { cx: x(row.step_s), cy: y(row.memory_bytes / 2 ** 30), r: row.name === best.name ? 7 : 5, fill: row.name === best.name ? "var(--accent)" : "var(--faint)" },
      make("title", {}, `${row.name}: ${span(row.step_s)}, ${bytes(row.memory_bytes)}`)));
  return make("div", { class: "card wide" }, svg);
}

// --- several sites ---

const across = { sites: null, model: "llama3-405b", answer: null, timer: 0, map: "best" };
const ACROSS_POLL_MS = 1000;

function acrossPart() {
  const names = Object.keys(plan.choices.sites || {});
  if (!names.length) return [];
  across.sites = across.sites || names[0];
  if (!plan.choices.models.includes(across.model)) across.model = plan.choices.models[0];
  const select = (key, list) => make("select", { id: "across-" + key, onchange: (event) => { across[key] = event.target.value; across.answer = null; showAcross(); } }, ...list.map((name) => make("option", { selected: name === across[key] ? "" : null }, name)));
  const button = make("button", { id: "across-search", type: "button", onclick: () => askAcross() }, "find the best plan");
  const parts = section("Several sites", make("div", { class: "card wide", id: "across" },
    make("p", {}, "One model, trained on data centres that are kilometres apart: which axis of parallelism should cross the links between them? The batch is 32 million tokens a step. The search takes half a minute or longer."),
    make("p", {}, make("label", {}, "model ", select("model", plan.choices.models)), " ", make("label", {}, "sites ", select("sites", names)), " ", button), make("div", { id: "across-answer", "aria-live": "polite" })));
  setTimeout(showAcross, 0);
  return parts;
}

async function askAcross() {
  clearTimeout(across.timer);
  try {
    const response = await fetch("across.json?" + new URLSearchParams({ sites: across.sites, model: across.model }), { cache: "no-store" });
    across.answer = response.ok ? await response.json() : { error: await response.text() };
  } catch {
    across.answer = { error: "no connection to the server" };
  }
  if (view.page !== "plan") return;  // nobody waits
  showAcross();
  if (across.answer.searching) across.timer = setTimeout(askAcross, ACROSS_POLL_MS);
}

function showAcross() {
  const box = byId("across-answer"), found = across.answer;
  if (!box) return;
  if (!found) { box.replaceChildren(); return; }
  if (found.error) { box.replaceChildren(make("p", { class: "empty" }, found.error)); return; }
  if (found.searching) {
    const { seconds, limit_s: limit } = found.searching;
    box.replaceChildren(make("p", { class: "hint" }, make("progress", { max: limit, value: seconds, "aria-label": "search" }), ` searching for ${span(seconds)}, at most ${span(limit)}`));
    return;
  }
  const maps = { best: ["best plan", found.map], default: ["production default", found.default_map] };
  const buttons = Object.entries(maps).map(([key, [label]]) => make("button", { type: "button", "aria-pressed": String(across.map === key), onclick: () => { across.map = key; showAcross(); } }, label));
  const svg = document.importNode(new DOMParser().parseFromString(maps[across.map][1], "image/svg+xml").documentElement, true);
  const rows = Object.entries(found.rows).map(([name, row]) => [name, span(row.step_s), "$" + digits(row.usd_per_step, 3), row.crossing, row.placement,
    ["tp", "pp", "cp", "ep"].filter((axis) => row[axis] > 1).map((axis) => `${axis} ${row[axis]}`).join(" ") || "dp", row.schedule, `${row.routing}, ${row.transport}${row.extra_wavelengths ? `, ${row.extra_wavelengths} more wavelengths` : ""}`]);
  box.replaceChildren(
    make("div", { class: "tiles" }, tile("step against the production default", "−" + percent(found.gain), `${percent(found.gain_as_built)} shorter with the links as they are`, found.gain),
      tile("step of the best plan", span(found.rows.best.step_s), `production default: ${span(found.rows["production default"].step_s)}`, found.rows.best.step_s),
      tile("combinations searched", short(found.searched), `in ${span(found.seconds)}`, found.searched)),
    make("p", {}, make("span", { class: "group", role: "group", "aria-label": "Map" }, ...buttons)), make("div", { class: "scroll sites", tabindex: "0" }, svg),
    legend([{ label: "pipeline stages cross this link", colour: "var(--c1)" }, { label: "data parallelism (gradients)", colour: "var(--c0)" }, { label: "both", colour: "var(--c3)" }, { label: "not used (dashed); thicker: more bandwidth", colour: "var(--faint)" }]),
    make("p", { class: "hint" }, found.why), tableCard("across-rows", ["", "step", "$ a step", "crosses the links", "placement", "inside a site", "schedule", "network"], rows, [1, 2]),
    make("p", { class: "hint" }, found.notes.join(". ")), make("p", { class: "hint" }, "The same in a terminal: ", make("code", {}, found.command)));
}
