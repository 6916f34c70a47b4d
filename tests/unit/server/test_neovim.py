"""A real editor drives `lakh lsp`: Neovim, headless, with its own LSP client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from lakh.server.engine import Engine
from lakh.server.observability.request_record import RequestRecord

from .test_fuzz import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvim") is None, reason="Neovim is not installed: apt-get install neovim"),
]

TIMEOUT_S = 150.0
# Opens a file, attaches `lakh lsp`, edits the buffer as a user does, asks for a suggestion, inserts it and says so.
SCRIPT = """
local out, file, python, url = OUT, FILE, PYTHON, URL
local result = {}
local function finish()
  local handle = io.open(out, "w")
  handle:write(vim.json.encode(result))
  handle:close()
  vim.cmd("qa!")
end
local ok, problem = pcall(function()
  vim.cmd("edit " .. vim.fn.fnameescape(file))
  local id = vim.lsp.start_client({
    name = "lakh",
    cmd = { python, "-m", "lakh", "lsp", "--url", url, "--debounce-ms", "0", "--timeout-ms", "60000" },
    handlers = { ["window/showMessage"] = function(_, params) result.message = params.message end },
    on_exit = function(code) result.exit_code = code end,
  })
  result.started = vim.wait(LIMIT, function()
    local client = vim.lsp.get_client_by_id(id)
    return client ~= nil and client.initialized == true
  end)
  local client = vim.lsp.get_client_by_id(id)
  result.server = client.server_capabilities.inlineCompletionProvider
  local buffer = vim.api.nvim_get_current_buf()
  vim.lsp.buf_attach_client(buffer, id)
  vim.api.nvim_buf_set_text(0, 0, 8, 0, 8, { "left," })  -- didChange, incremental
  local function ask(row, column)
    local answer = nil
    local params = {
      textDocument = vim.lsp.util.make_text_document_params(0),
      position = { line = row, character = column },
      context = { triggerKind = 1 },
    }
    local function keep(error, found) answer = { error, found } end
    client.request("textDocument/inlineCompletion", params, keep, buffer)
    vim.wait(LIMIT, function() return answer ~= nil end)
    return answer
  end
  local answer = ask(0, 13)
  result.error = answer[1]
  result.items = answer[2].items
  local item = result.items[1]
  if item then
    vim.api.nvim_buf_set_text(0, 0, 13, 0, 13, vim.split(item.insertText, "\\n"))
    result.accepted = client.request_sync("workspace/executeCommand", { command = item.command.command }, LIMIT, buffer)
  end
  result.lines = vim.api.nvim_buf_get_lines(0, 0, -1, false)
  vim.lsp.stop_client(id)
  result.stopped = vim.wait(LIMIT, function() return vim.lsp.get_client_by_id(id) == nil end)
end)
if not ok then result.problem = tostring(problem) end
finish()
"""


class _Prompts:
    """What the service was asked."""

    def __init__(self) -> None:
        self.prompts: list[object] = []

    def begin(self, record: RequestRecord) -> None:
        pass

    def finish(self, record: RequestRecord) -> None:
        assert record.request is not None
        self.prompts += record.request.prompts


def test_neovim_asks_lakh_lsp_for_a_suggestion_and_inserts_it(engine: Engine, tmp_path: Path) -> None:
    file, out, script = tmp_path / "add.py", tmp_path / "result.json", tmp_path / "drive.lua"
    file.write_text("def add(\n    pass\n")
    seen = _Prompts()
    with serving(engine, observers=[seen]) as (url, _):
        values = {"OUT": str(out), "FILE": str(file), "PYTHON": sys.executable, "URL": url}
        lua = SCRIPT.replace("LIMIT", "60000")
        for name, value in values.items():
            lua = lua.replace(name, json.dumps(value), 1)
        script.write_text(lua)
        command = ["nvim", "--headless", "--clean", "-n", "-c", f"luafile {script}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
            metrics = response.read().decode()
    assert out.exists(), done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert "problem" not in result, result
    assert (result["started"], result["server"], result["stopped"]) == (True, True, True)
    assert "error" not in result or result["error"] is None
    (item,) = result["items"]
    assert item["insertText"]
    assert "\n".join(result["lines"]) == f"def add(left,{item['insertText']}\n    pass"
    assert result.get("message") is None
    assert seen.prompts == ["def add(left,"]  # with the edit of the buffer
    assert "lakh:suggestions_shown_total 1.0" in metrics
    assert "lakh:suggestions_accepted_total 1.0" in metrics
