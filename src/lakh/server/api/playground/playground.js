"use strict";
const byId = (id) => document.getElementById(id);
const EXAMPLE = [
  "def read_lines(path):\n    \"\"\"The lines of a file, without line breaks.\"\"\"\n    with open(path) as file:\n        ",
  "\n\n\nfor line in read_lines(\"notes.txt\"):\n    print(line)\n",
];
const CONTEXT_CHARS = 400;
const RETRY_MS = 3000;
let controller = null;
let last = null; // of the shown completion: where it belongs, and its text

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

async function checkServer() {
  let text = "the server does not answer";
  try {
    const response = await fetch("ready"); // relative: the page may be served under another path
    const body = await response.json();
    text = response.ok ? body.model + " is ready" : body.status;
  } catch { /* shown as not answering */ }
  byId("server").textContent = text;
  setTimeout(checkServer, RETRY_MS);
}

function fail(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function show(id, value) {
  byId(id).textContent = value;
}

/** The last characters before the cursor or the first after it, of which `cached` from the prompt's beginning were cached. */
function showContext(id, text, cached, isEnd) {
  const from = isEnd ? Math.max(0, text.length - CONTEXT_CHARS) : 0;
  const shown = text.slice(from, from + CONTEXT_CHARS);
  const length = Math.min(shown.length, Math.max(0, cached - from));
  byId(id).replaceChildren(piece("cached", shown.slice(0, length), ""), shown.slice(length));
}

function piece(kind, text, title) {
  const node = document.createElement("span");
  if (kind) node.className = kind;
  if (title) node.title = title;
  node.append(text);
  return node;
}

/** Tokens are counted, not characters: the place in the text where the cached part ends is an estimate. */
function showCached(body, usage) {
  const share = usage.prompt_tokens_details.cached_tokens / Math.max(usage.prompt_tokens, 1);
  const suffixFirst = body.order === "spm" && body.suffix;
  const chars = share * (body.prompt.length + body.suffix.length);
  showContext("before", body.prompt, Math.round(suffixFirst ? chars - body.suffix.length : chars), true);
  showContext("after", body.suffix, Math.round(suffixFirst ? chars : chars - body.prompt.length), false);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (held + value).split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function complete() {
  controller?.abort();
  const mine = (controller = new AbortController());
  const code = byId("code").value;
  const at = byId("code").selectionStart;
  const isMiddle = byId("middle").checked;
  const body = {
    prompt: code.slice(0, at),
    suffix: isMiddle ? code.slice(at) : "",
    order: byId("order").value,
    max_tokens: Number(byId("tokens").value) || 48,
    temperature: Number(byId("temperature").value) || 0,
    stream: true,
    stream_options: { include_usage: true },
  };
  fail("");
  for (const id of ["first", "whole", "prompt", "cached", "new", "drafts", "speed", "reason"]) show(id, "–");
  showContext("before", body.prompt, 0, true);
  showContext("after", body.suffix, 0, false);
  show("text", "");
  byId("stop").disabled = false;
  byId("accept").disabled = true;
  const began = performance.now();
  let first = null;
  let before = began;
  let text = "";
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.signal };
    const response = await fetch("v1/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        if (first === null) {
          first = performance.now() - began;
          show("first", first.toFixed(0) + " ms");
        }
        const now = performance.now();
        const accepted = choice.accepted_prediction_tokens || 0;
        const title = `${(now - before).toFixed(0)} ms` + (accepted ? `, ${accepted} accepted draft tokens` : "");
        before = now;
        text += choice.text;
        if (choice.text) byId("text").append(piece(accepted ? "drafted" : "", choice.text, title));
        if (choice.finish_reason) show("reason", choice.finish_reason);
      }
      if (event.usage) {
        const whole = performance.now() - began;
        const tokens = event.usage.completion_tokens;
        show("whole", whole.toFixed(0) + " ms");
        show("prompt", event.usage.prompt_tokens);
        show("cached", event.usage.prompt_tokens_details.cached_tokens);
        show("new", tokens);
        const { accepted_prediction_tokens: kept = 0, rejected_prediction_tokens: refused = 0 } = event.usage.completion_tokens_details || {};
        if (kept + refused) show("drafts", `${kept} of ${kept + refused}`);
        showCached(body, event.usage);
        if (tokens > 1) show("speed", (((tokens - 1) * 1000) / Math.max(whole - first, 1)).toFixed(0));
      }
    }
    last = { code, at, text };
    byId("accept").disabled = !text;
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    if (controller === mine) byId("stop").disabled = true;
  }
}

function accept() {
  if (!last || byId("accept").disabled) return;
  const box = byId("code");
  box.value = last.code.slice(0, last.at) + last.text + last.code.slice(last.at);
  box.selectionStart = box.selectionEnd = last.at + last.text.length;
  box.focus();
  byId("accept").disabled = true;
}

byId("complete").addEventListener("click", complete);
byId("stop").addEventListener("click", () => controller?.abort());
byId("accept").addEventListener("click", accept);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey || event.altKey)) return;
  event.preventDefault();
  if (event.altKey) accept(); else complete();
});
byId("code").value = EXAMPLE.join("");
byId("code").selectionStart = byId("code").selectionEnd = EXAMPLE[0].length;
byId("code").focus();
checkServer();
