"""lakh lsp: inline completions in any editor with an LSP client."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import click

from lakh.cli.serve_options import read_key
from lakh.errors import UserError

__all__ = ["lsp"]


@click.command(context_settings={"show_default": True})
@click.option("--url", default="http://127.0.0.1:8000", help="The completion service: lakh serve or lakh gateway.")
@click.option("--key-file", type=click.Path(), help="File with an API key of the service.")
@click.option("--max-tokens", type=click.IntRange(1, 4096), default=64, help="Longest suggestion.")
@click.option("--debounce-ms", type=click.IntRange(0, 5000), default=75, help="Wait after a keystroke.")
@click.option("--json", "as_json", is_flag=True, help="If it cannot run, end with one JSON document that says why.")
@click.option("--timeout-ms", type=click.IntRange(50, 60_000), default=5000, help="Longest wait for the service.")
def lsp(url: str, key_file: str | None, max_tokens: int, debounce_ms: int, timeout_ms: int, as_json: bool) -> int:
    """Run a language server with inline completions for an editor.

    An editor starts it and speaks LSP over stdin and stdout. It answers textDocument/inlineCompletion with suggestions
    of a completion service, which runs apart from it (lakh serve). The editor's other open files and files of the same
    folder are sent as context. See the page on editors.
    """
    from lakh.server.lsp.server import LanguageServerOptions, serve_streams

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--url {url}", "is not an address", "write e.g. http://127.0.0.1:8000")
    options = LanguageServerOptions(
        url.rstrip("/"), read_key(key_file) if key_file else "", max_tokens, debounce_ms / 1000, timeout_ms / 1000
    )
    # Not sys.stdin.buffer, and never closed: Python aborts if a thread still reads from it when the interpreter ends.
    stdin = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115
    return serve_streams(options, stdin, sys.stdout.buffer)
