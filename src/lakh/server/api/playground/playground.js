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
    const response = await fetch("/ready");
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
  for (const id of ["first", "whole", "prompt", "cached", "new", "speed", "reason"]) show(id, "–");
  show("before", body.prompt.slice(-CONTEXT_CHARS));
  show("after", body.suffix.slice(0, CONTEXT_CHARS));
  show("text", "");
  byId("stop").disabled = false;
  byId("accept").disabled = true;
  const began = performance.now();
  let first = null;
  let text = "";
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.signal };
    const response = await fetch("/v1/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        if (first === null) {
          first = performance.now() - began;
          show("first", first.toFixed(0) + " ms");
        }
        text += choice.text;
        show("text", text);
        if (choice.finish_reason) show("reason", choice.finish_reason);
      }
      if (event.usage) {
        const whole = performance.now() - began;
        const tokens = event.usage.completion_tokens;
        show("whole", whole.toFixed(0) + " ms");
        show("prompt", event.usage.prompt_tokens);
        show("cached", event.usage.prompt_tokens_details.cached_tokens);
        show("new", tokens);
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
