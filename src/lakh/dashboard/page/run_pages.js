"use strict";
// The pages of one run beside its overview: goodput with its interruptions, the fleet of ranks, data, evaluations.

const PAGES = { overview: "Overview", goodput: "Goodput", fleet: "Fleet", data: "Data", evaluations: "Evaluations" };

function pageLinks(run) {
  const exists = { goodput: true, fleet: run.fleet !== null, data: run.training_data !== null,
    evaluations: run.evaluations.length || Object.keys(run.scores).length || Object.keys(run.curves).some((name) => name.includes(": ")) };
  return make("nav", { class: "pages", "aria-label": "Pages of this run" }, ...Object.entries(PAGES).filter(([page]) => page === "overview" || exists[page]).map(([page, title]) =>
    make("a", { href: `#${encodeURIComponent(run.name)}${page === "overview" ? "" : "/" + page}`, "aria-current": view.page === page ? "page" : null }, title)));
}

function runPage(run) {
  if (view.page === "goodput") return [...section("Time", timeCard([run]), timelineCard(run)), ...section("Interruptions", interruptionsCard(run))];
  if (view.page === "fleet" && run.fleet) return fleetPage(run);
  if (view.page === "data" && run.training_data) return dataPage(run);
  if (view.page === "evaluations") return [...section("Scores of the checkpoints", ...scoreCharts([run])), ...section("Evaluations", evaluationsCard(run))];
  return null;
}

function tableCard(id, columns, rows, numeric, ...below) {
  return make("div", { class: "card wide scroll", id, tabindex: "0" },
    make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((word, i) => make("th", { class: numeric.includes(i) ? "n" : null, scope: "col" }, word)))),
      make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell, i) => make("td", { class: numeric.includes(i) ? "n" : null }, cell)))))), ...below);
}

// --- data ---

function dataPage(run) {
  const corpus = run.training_data.corpus;
  if (corpus) askCorpus(run);
  return [...section("Training data, from files to tokens", dataCard(run)), ...(corpus ? section("Largest groups of duplicates", clustersCard(run)) : []), ...(corpus ? section("Documents kept", countsCard("languages", corpus.languages, corpus.language_bytes),
    countsCard("licences", corpus.licences, {}), countsCard("redacted", corpus.secrets, {})) : []), ...(corpus ? section("Some of what was dropped", droppedCard(run)) : [])];
}

/** Duplicates and dropped documents are in the corpus, not in the run: they are asked for when the page is first shown. */
async function askCorpus(run) {
  const path = run.training_data.corpus.path;
  if (saved || view.corpus[path]) return;
  view.corpus[path] = { waiting: true };
  const response = await fetch("corpus.json?" + new URLSearchParams({ run: run.name }), { cache: "no-store" }).catch(() => null);
  view.corpus[path] = response && response.ok ? await response.json() : { error: "the corpus cannot be read" };
  if (view.page === "data") show();
}

/** The part of the answer that a card needs, or a card that says why there is none. */
function corpusPart(run, part) {
  const found = view.corpus[run.training_data.corpus.path];
  if (found && found[part]) return { found: found[part] };
  const text = saved ? "A saved page does not hold them; lakh dashboard shows them." : !found || found.waiting ? "reading …" : found.error;
  return { card: make("div", { class: "card wide" }, make("p", { class: "hint" }, text)) };
}

function clustersCard(run) {
  const { found, card } = corpusPart(run, "clusters");
  if (!found) return card;
  if (!found.length) return make("div", { class: "card wide" }, make("p", { class: "hint" }, "No document has a duplicate."));
  return tableCard("clusters", ["kept document", "exact", "near", "dropped in its favour, for example"], found.map((one) =>
    [one.place, whole(one.exact), whole(one.near), one.members.join(", ")]), [1, 2]);
}

function droppedCard(run) {
  const { found, card } = corpusPart(run, "dropped");
  if (!found) return card;
  const rows = Object.entries(found).flatMap(([reason, list]) => list.map((one) => [reason.replaceAll("-", " "), one.place, one.detail]));
  return rows.length ? tableCard("dropped", ["reason", "document", "detail"], rows, []) : make("div", { class: "card wide" }, make("p", { class: "hint" }, "Nothing was dropped."));
}

function countsCard(title, counts, sizes) {
  const rows = Object.entries(counts), most = Math.max(...Object.values(counts), 1);
  if (!rows.length) return null;
  const bar = (count) => make("span", { class: "bar" }, make("i", { vars: { width: 100 * count / most + "%" } }));
  const sized = Object.keys(sizes).length > 0, cells = ([name, count]) => [name || "not stated", whole(count), ...(sized ? [megabytes(sizes[name])] : []), bar(count)];
  return tableCard("counts-" + title, [title, "number", ...(sized ? ["size"] : []), ""], rows.map(cells), sized ? [1, 2] : [1]);
}

// --- interruptions ---

function interruptionsCard(run) {
  if (!run.interruptions.length) return make("div", { class: "card wide" }, make("p", { class: "empty" }, "No interruption so far."));
  const failures = run.interruptions.filter((one) => one.kind !== "stop");
  const cost = (one) => (one.kind === "stop" ? 0 : (one.detection_s || 0) + (one.recovery_s || 0)) + one.lost_s;
  const total = run.interruptions.reduce((sum, one) => sum + cost(one), 0), at_work = Object.values(run.spent_s).reduce((a, b) => a + b, 0);
  const rows = run.interruptions.map((one) => [clock(one.began_s, true), whole(one.step), one.kind, one.cause, span(one.detection_s), one.recovery_s === null ? "not yet" : span(one.recovery_s),
    one.lost_steps ? `${whole(one.lost_steps)} (${span(one.lost_s)})` : "0", span(cost(one))]);
  return tableCard("interruptions", ["when", "step", "kind", "cause", "detected after", "recovered after", "lost steps", "cost"], rows, [1, 4, 5, 6, 7],
    make("p", { class: "hint" }, `${many(failures.length, "failure")}${failures.length ? `, one in ${span(at_work / failures.length)} of work` : ""}; they cost ${span(total)}, ${percent(at_work ? total / at_work : 0)} of the time. ` +
      "Recovered: the first step after it begins. The time of a stop on request does not count."));
}

// --- fleet ---

function fleetPage(run) {
  return [...section("Ranks", rankMap(run.fleet)), ...section("Stragglers", heatCard(run.fleet), slowestCard(run.fleet)), ...section("Links", linkMap(run), trafficCard(run)), ...section("Node checks", healthCard(run.health))];
}

function linkMap(run) {
  const links = run.links;
  if (!links)
    return make("div", { class: "card wide" }, make("p", { class: "hint" }, "No pair of ranks was measured. ", make("code", {}, "lakh health pairs --json > RUNS/pairs.json"), " measures all of them, between jobs."));
  const wrong = new Set(links.wrong.map(([row, column]) => row + " " + column)), most = Math.max(...links.GBps.flat().filter((rate) => rate !== null), 1e-9);
  const name = (cell) => links.ranks_per_cell > 1 ? `ranks ${cell * links.ranks_per_cell} to ${Math.min(links.size, (cell + 1) * links.ranks_per_cell) - 1}` : `rank ${cell}`;
  const table = make("table", { class: "links", role: "img", "aria-label": `bandwidth between ${many(links.size, "rank")}: median ${digits(links.median_GBps, 3)} GB/s` });
  links.GBps.forEach((row, i) => table.append(make("tr", {}, ...row.map((rate, j) => rate === null ? make("td", { class: "none" }) : make("td",
    { class: wrong.has(i + " " + j) ? "wrong" : null, vars: { "--heat": (rate / most).toFixed(2) }, title: `${name(i)} and ${name(j)}: ${digits(rate, 3)} GB/s${wrong.has(i + " " + j) ? ", wrong sums" : ""}` })))));
  const faulty = Object.entries(links.faulty).map(([rank, reason]) => `rank ${rank}: ${reason}`).join("; ");
  const slow = tableCard("slow-links", ["slowest pairs", "GB/s", "sums"], links.slowest.map((one) => [`rank ${one.first} and rank ${one.second}`, digits(one.GBps, 3), one.is_right ? "right" : "wrong"]), [1]);
  slow.classList.remove("wide");
  return make("div", { class: "card wide scroll", id: "links", tabindex: "0" }, make("h3", {}, "Bandwidth between every two ranks"),
    make("div", { class: "legend" }, make("span", {}, `${whole(links.pairs)} pairs, median ${digits(links.median_GBps, 3)} GB/s · darker: faster · red: wrong sums` +
      (links.ranks_per_cell > 1 ? ` · a cell is ${links.ranks_per_cell} × ${links.ranks_per_cell} ranks, by their slowest pair` : ""))),
    make("div", { class: "beside" }, table, slow), faulty ? make("p", { class: "hint" }, faulty) : null);
}

function trafficCard(run) {
  const rows = Object.entries(run.fleet.sent_bytes);
  if (!rows.length) return null;
  return tableCard("traffic", ["tier", "rank 0 sends in a step", "over the step time"], rows.map(([tier, size]) => [tier, megabytes(size), run.step_s ? digits(size / run.step_s / 1e9, 3) + " GB/s" : "–"]), [1, 2]);
}

function rankMap(fleet) {
  const box = make("div", { class: "card wide", id: "ranks" });
  const lost = fleet.states.filter((state) => state === "lost").length, most = Math.max(...fleet.waited_s, 0);
  const mesh = fleet.mesh.map((axis) => `${axis.axis} ${axis.size}`).join(" × ");
  box.append(make("h3", {}, many(fleet.size, "rank") + (fleet.devices.length ? " on " + fleet.devices.join(", ") : "")),
    make("div", { class: "legend" }, make("span", {}, (mesh ? `mesh: ${mesh} · ` : "") + (fleet.ranks_per_cell > 1 ? `a cell is ${fleet.ranks_per_cell} ranks · ` : "") +
      `${lost ? many(lost, "cell") + " with lost ranks · " : ""}darker: the others waited longer for it`)));
  const node = fleet.tiers.length ? Math.max(1, Math.round(fleet.tiers[0].size / fleet.ranks_per_cell)) : fleet.states.length;
  const groups = make("div", { class: "nodes", role: "img", "aria-label": `${many(fleet.size, "rank")}, ${many(lost, "cell")} with lost ranks` });
  for (let first = 0; first < fleet.states.length; first += node) {
    const cells = fleet.states.slice(first, first + node).map((state, i) => {
      const rank = (first + i) * fleet.ranks_per_cell, waited = fleet.waited_s[first + i];
      return make("i", { class: "rank " + state, vars: { "--heat": most ? Math.sqrt(waited / most).toFixed(2) : 0 }, title: `${place(fleet, rank)}: ${state}, waited for ${span(waited)}` });
    });
    groups.append(make("div", { class: "node" }, ...cells));
  }
  box.append(groups);
  return box;
}

/** A rank with its place: rank 13 (node 1, dp_shard 1, tp 5). */
function place(fleet, rank) {
  const words = fleet.tiers.map((tier) => `${tier.name} ${Math.floor(rank / tier.size)}`);
  let left = rank;
  const axes = [...fleet.mesh].reverse().map((axis) => { const at = left % axis.size; left = Math.floor(left / axis.size); return `${axis.axis} ${at}`; });
  const all = [...words, ...axes.reverse()];
  return `rank ${rank}` + (all.length ? ` (${all.join(", ")})` : "");
}

function heatCard(fleet) {
  const { ranks, rows, first_step: first, last_step: last } = fleet.heat;
  if (!ranks.length) return make("div", { class: "card wide" }, make("p", { class: "empty" }, "No rank was slower than the others so far, or the run has one rank."));
  const most = Math.max(...rows.flat()), buckets = rows[0].length, steps = (last - first + 1) / buckets;
  const box = make("div", { class: "card wide scroll", id: "stragglers", tabindex: "0" }, make("h3", {}, "Seconds that the mean rank waited for the slowest, by steps"));
  const table = make("table", { class: "heat" });
  ranks.forEach((rank, i) => table.append(make("tr", {}, make("th", { scope: "row", title: place(fleet, rank) }, "rank " + rank), ...rows[i].map((waited, column) => {
    const from = Math.round(first + column * steps), to = Math.round(first + (column + 1) * steps - 1);
    return make("td", { vars: { "--heat": most ? Math.sqrt(waited / most).toFixed(2) : 0 }, title: `rank ${rank}, steps ${from}–${Math.max(from, to)}: ${span(waited)}` });
  }))));
  box.append(table, make("p", { class: "hint" }, `steps ${whole(first)} to ${whole(last)}; darkest: ${span(most)}`));
  return box;
}

function slowestCard(fleet) {
  if (!fleet.slowest.length) return null;
  return tableCard("slowest", ["rank", "slowest in", "others waited"], fleet.slowest.map((one) => [place(fleet, one.rank), many(one.steps, "step"), span(one.waited_s)]), [1, 2]);
}

function healthCard(findings) {
  if (!findings.length)
    return make("div", { class: "card wide" }, make("p", { class: "hint" }, "No findings. ", make("code", {}, "lakh health check --ledger RUNS/health.jsonl"), " on each node writes them where this page reads them."));
  const counts = new Map();
  for (const one of findings) {
    const key = `${one.serial} ${one.node}`, row = counts.get(key) || { serial: one.serial, node: one.node, all: 0, drains: 0, last: one };
    row.all += 1;
    row.drains += one.level === "drain" || one.level === "rma";
    counts.set(key, row);
  }
  const rows = [...counts.values()].sort((a, b) => b.drains - a.drains || b.all - a.all).map((row) => [row.serial, row.node, whole(row.all), whole(row.drains), clock(row.last.time_s, true), `${row.last.check}: ${row.last.reason}`]);
  return tableCard("offenders", ["serial number", "node", "findings", "drain or rma", "last", "what was found last"], rows, [2, 3]);
}
