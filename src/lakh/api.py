"""The Python API: `import lakh`, then corpus, tokenizer, training and serving from a script.

Each function does what the command of the same purpose does, with the same checks, errors and files, and returns what
`--json` prints or the object behind it. `lakh` itself imports nothing heavy: functions are loaded when they are used.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakh.errors import PeerLost, UserError
from lakh.spec import load_run

if TYPE_CHECKING:
    from lakh.corpus import CorpusReport
    from lakh.server.engine import Engine
    from lakh.tokens.dataset.packing import PackingResult
    from lakh.tokens.tokenizer.training import TokenizerTrainingResult

__all__ = [
    "CompletionServer",
    "build_corpus",
    "load_engine",
    "pack_tokens",
    "resume",
    "serve",
    "train",
    "train_tokenizer",
]

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 120.0

Settings = Mapping[str, Any]
"""Settings by their path, such as {"train.steps": 100}; docs/reference/settings.md lists them."""


def build_corpus(sources: Sequence[str | Path], out: str | Path, **options: Any) -> CorpusReport:
    """Raw code to clean Parquet in `out`, as `lakh corpus build`. `options` are those of lakh.corpus.build."""
    from lakh.corpus import build

    return build([str(source) for source in sources], out, **options)


def train_tokenizer(corpus: str | Path, out: str | Path, vocab: int = 4096) -> TokenizerTrainingResult:
    """Train a byte-level BPE tokenizer on a corpus, as `lakh tokens train`."""
    from lakh.tokens.tokenizer.training import train as learn

    return learn(corpus, out, vocab=vocab)


def pack_tokens(corpus: str | Path, tokenizer: str | Path, out: str | Path, heldout: float = 0.02) -> PackingResult:
    """Encode a corpus into token shards, as `lakh tokens pack`."""
    from lakh.tokens.dataset.packing import pack

    return pack(corpus, tokenizer, out, heldout_fraction=heldout)


def train(
    run: str | Path, out: str | Path, settings: Settings | None = None, *, nproc: int = 1, max_restarts: int = 3
) -> dict[str, object]:
    """Train a recipe or run.toml with `nproc` ranks on this machine, as `lakh train`. Returns its result."""
    from lakh.trainer.launch.local import train_here

    return train_here(load_run(str(run), _as_sets(settings)), str(out), nproc=nproc, max_restarts=max_restarts)


def resume(
    run_dir: str | Path, settings: Settings | None = None, *, nproc: int = 1, max_restarts: int = 3
) -> dict[str, object]:
    """Continue a run from its newest complete checkpoint, as `lakh resume`. Returns its result."""
    from lakh.trainer.launch.local import resume_here

    return resume_here(str(run_dir), _as_sets(settings), nproc=nproc, max_restarts=max_restarts)


def load_engine(model: str | Path, **options: Any) -> Engine:
    """Load a run, checkpoint, Hugging Face folder or GGUF file for generation in this process."""
    from lakh.server.engine import Engine

    return Engine.load(str(model), **options)


class CompletionServer:
    """A running `lakh serve`: its address, and completions from it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, prompt: str, suffix: str | None = None, **parameters: Any) -> str:
        """The text that follows `prompt`, or that fits between it and `suffix`. `parameters` as in /v1/completions."""
        body = {"prompt": prompt, **({"suffix": suffix} if suffix is not None else {}), **parameters}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            found = json.loads(error.read() or b"{}").get("error", {}).get("message", error.reason)
            raise UserError(f"{self.url}/v1/completions", str(found), "change the request") from None
        except OSError as error:
            raise PeerLost(self.url, f"gave no answer ({error})", "see what the server printed") from None


@contextlib.contextmanager
def serve(model: str | Path, *arguments: str) -> Iterator[CompletionServer]:
    """Serve a model over HTTP while the block runs, on a free port. `arguments` are options of `lakh serve`."""
    options = arguments if "--http" in arguments else ("--http", "127.0.0.1:0", *arguments)
    command = [sys.executable, "-m", "lakh", "serve", str(model), *options, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
            watchdog.cancel()
            if not line:
                found = f"ended with exit code {process.wait(STOP_TIMEOUT_S)} before it was ready"
                raise PeerLost(f"lakh serve {model}", found, "see what it printed")
            yield CompletionServer(json.loads(line)["url"])
        finally:
            watchdog.cancel()
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _as_sets(settings: Settings | None) -> tuple[str, ...]:
    return tuple(f"{path}={_as_toml(value)}" for path, value in (settings or {}).items())


def _as_toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
