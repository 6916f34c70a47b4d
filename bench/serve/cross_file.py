"""lakh bench completion: what context from other files gains, on lines that use names of other files.

Every task is completed with several contexts and the same number of prompt tokens:

    line         the start of the line alone
    file         the file above the cursor
    neighbours   the file, after the first 2,000 characters of up to three files of its folder
    snippets     the file, after outlines that retrieval chooses (lakh.server.retrieval), as `lakh lsp` sends them

Measured are the bits per byte of the true rest of the line, how often the greedy completion equals it, and the edit
similarity of the two. Differences are paired by task, with a bootstrap interval. Prompts are those of the service
(PromptEncoder). Use packages that were published after the model's training data.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.harness import BenchRow, out_option, result
from bench.serve.cross_file_tasks import CrossFileTask, tasks_of
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError
from lakh.server.prompts.extra_files import ExtraFile
from lakh.server.retrieval.repository import Repository
from lakh.server.retrieval.snippets import related_snippets

__all__ = ["CONTEXTS", "LineScorer", "completion", "context_of"]

CONTEXTS = ("line", "file", "neighbours", "snippets")
BASELINE = "file"
MAX_NEW_TOKENS = 32
NEIGHBOURS, NEIGHBOUR_CHARS = 3, 2_000


class LineScore(NamedTuple):
    bits: float
    num_bytes: int
    is_exact: bool
    similarity: float
    """Of the greedy completion's first line and the answer, 0 to 1."""
    prompt_tokens: int


class LineScorer:
    """Scores the rest of a line after a prompt with the engine's network: a forward pass over prompt and answer, then
    greedy steps from the first token that differs."""

    def __init__(self, model: str, precision: str, budget: int) -> None:
        import torch

        from lakh.server.model import weights as model_weights
        from lakh.server.model.block_pool import BLOCK_TOKENS
        from lakh.server.model.inference import InferenceModel
        from lakh.server.model.kv_cache import PagedCache
        from lakh.server.prompts.encoder import PromptEncoder
        from lakh.tokens.tokenizer import Tokenizer

        loaded = model_weights.read(model)
        self._tokenizer, device = Tokenizer.load(loaded.tokenizer_json), torch.device("cpu")
        size: Any = precision
        self._network = InferenceModel(loaded.spec, loaded.weights, self._tokenizer.vocab_size, device, size)
        self._encoder = PromptEncoder(self._tokenizer, replace(loaded.spec, context=budget + MAX_NEW_TOKENS))
        num_blocks = -(-(budget + 4 * MAX_NEW_TOKENS) // BLOCK_TOKENS)
        self._cache = PagedCache(loaded.spec, num_blocks, device=device, dtype=self._network.dtype)

    def score(self, before: str, answer: str, extra: Sequence[ExtraFile]) -> LineScore:
        from lakh.server.model.inference import SequenceChunk

        # The tokens of the answer as they follow the prefix's own; whitespace between the two belongs to the answer.
        stem = before.rstrip(" ")
        prompt = self._encoder.prompt_at_cursor(stem, "", MAX_NEW_TOKENS, extra=extra).ids
        answer = before[len(stem) :] + answer
        ids = self._tokenizer.encode(answer + "\n")[: 3 * MAX_NEW_TOKENS]
        blocks = list(range(self._cache.num_blocks))
        chunk = SequenceChunk([*prompt, *ids], 0, blocks, len(ids) + 1)
        logits = self._network.forward([chunk], self._cache)[:-1].float()
        chosen = logits.argmax(-1).tolist()
        scores = logits.log_softmax(-1)
        bits = -sum(float(scores[at, token]) for at, token in enumerate(ids)) / math.log(2)
        same = next((at for at, token in enumerate(ids) if chosen[at] != token), len(ids))
        made = [*ids[:same], *chosen[same : same + 1]]
        while same < len(ids) and len(made) < MAX_NEW_TOKENS and "\n" not in self._tokenizer.decode(made).lstrip("\n"):
            step = SequenceChunk(made[-1:], len(prompt) + len(made) - 1, blocks, 1)
            made.append(int(self._network.forward([step], self._cache)[-1].argmax()))
        text = self._tokenizer.decode(made).partition("\n")[0].strip()
        similarity = difflib.SequenceMatcher(None, text, answer.strip(), autojunk=False).ratio()
        num_bytes = len((answer + "\n").encode())
        return LineScore(bits, num_bytes, text == answer.strip(), similarity, len(prompt))


def context_of(task: CrossFileTask, context: str, max_chars: int) -> tuple[str, list[ExtraFile]]:
    """The text before the cursor and the extra files of a prompt."""
    if context == "line":
        return task.before[task.before.rfind("\n") + 1 :], []
    if context == "neighbours":
        siblings = Repository(task.root).siblings(task.file, NEIGHBOURS)
        return task.before, [
            ExtraFile(file.relative_to(task.root).as_posix(), file.read_text(errors="replace")[:NEIGHBOUR_CHARS])
            for file in reversed(siblings)
        ]
    if context == "snippets":
        found = related_snippets(Repository(task.root), task.file, task.before, max_chars=max_chars)
        return task.before, found
    return task.before, []


def measure(
    tasks: Sequence[CrossFileTask],
    contexts: Sequence[str],
    scorer: Callable[[], LineScorer],
    max_chars: int,
    progress: Callable[[str], object],
    scores_file: Path | None = None,
) -> dict[str, list[LineScore]]:
    """The scores of every task by context. A scores file is read first and then extended, a line for each score; the
    model is loaded for scores that it does not have."""
    known = _read_scores(scores_file)
    scores: dict[str, list[LineScore]] = {context: [] for context in contexts}
    for number, task in enumerate(tasks):
        for context in contexts:
            progress(f"task {number + 1} of {len(tasks)}, {context}")
            key = f"{task.file.relative_to(task.root.parent)}:{task.before.count(chr(10)) + 1} {context}"
            if key not in known:
                before, extra = context_of(task, context, max_chars)
                known[key] = scorer().score(before, task.answer, extra)
                if scores_file is not None:
                    with scores_file.open("a") as file:
                        file.write(json.dumps({"task": key, **known[key]._asdict()}) + "\n")
            scores[context].append(known[key])
    return scores


def _read_scores(file: Path | None) -> dict[str, LineScore]:
    if file is None or not file.exists():
        return {}
    found = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            name = fields.pop("task")
            found[name] = LineScore(**fields)
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{file}:{number}", "is not a score of this benchmark", "name another file") from None
    return found


def summary_rows(scores: dict[str, list[LineScore]]) -> list[BenchRow]:
    """One row per context: means, and differences to BASELINE with 95 % intervals over tasks."""
    from lakh.evals.scoring.score import bootstrap_interval

    rows: list[BenchRow] = []
    for context, found in scores.items():
        total_bytes = sum(one.num_bytes for one in found)
        row: BenchRow = {
            "context": context,
            "tasks": len(found),
            "bits_per_byte": sum(one.bits for one in found) / total_bytes,
            "exact_match": sum(one.is_exact for one in found) / len(found),
            "edit_similarity": sum(one.similarity for one in found) / len(found),
            "prompt_tokens": sum(one.prompt_tokens for one in found) / len(found),
        }
        if context != BASELINE and BASELINE in scores:
            pairs = list(zip(found, scores[BASELINE], strict=True))
            sizes = [one.num_bytes for one in found]
            low, high = bootstrap_interval([one.bits - base.bits for one, base in pairs], sizes)
            row["bits_change"] = sum(one.bits - base.bits for one, base in pairs) / total_bytes
            row["bits_interval"] = f"{low:+.4f} to {high:+.4f}"
            for name, differences in (
                ("exact", [float(one.is_exact) - float(base.is_exact) for one, base in pairs]),
                ("similarity", [one.similarity - base.similarity for one, base in pairs]),
            ):
                low, high = bootstrap_interval(differences)
                row[f"{name}_change"] = sum(differences) / len(differences)
                row[f"{name}_interval"] = f"{low:+.3f} to {high:+.3f}"
        rows.append(row)
    return rows


@click.command("completion")
@click.argument("packages", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", required=True, help="A model as lakh serve takes it.")
@click.option(
    "--precision",
    type=click.Choice(("f32", "int8", "int4")),
    default="int8",
    show_default=True,
    help="Of the weights.",
)
@click.option("--contexts", default=",".join(CONTEXTS), show_default=True, help="Comma-separated.")
@click.option("--tasks", "count", type=click.IntRange(2), default=120, show_default=True, help="Lines to complete.")
@click.option("--budget", type=click.IntRange(128), default=1024, show_default=True, help="Tokens of each prompt.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="CPU threads.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of lines.")
@click.option(
    "--scores",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep each score in this file, and continue from it: same packages, model and budget.",
)
@out_option
@print_result
def completion(
    packages: Path,
    model: str,
    precision: str,
    contexts: str,
    count: int,
    budget: int,
    threads: int,
    seed: int,
    scores: Path | None,
    out: str | None,
) -> CommandResult:
    """Measure completions of lines that use names from other files, with and without retrieved context.

    PACKAGES is a folder with one folder per package, as `pip install --target` or unpacked wheels leave it.
    """
    import torch

    from lakh.server.model.cpu import packed

    names = [name.strip() for name in contexts.split(",") if name.strip()]
    for name in names:
        if name not in CONTEXTS:
            raise UserError(f"--contexts {name}", "no such context", f"choose from: {', '.join(CONTEXTS)}")
    tasks = tasks_of(packages, count, seed)
    if len(tasks) < 2:
        raise UserError(str(packages), "has fewer than two lines that use names of other files", "name more packages")
    torch.set_num_threads(threads)
    if precision != "f32":
        packed.use_threads(threads)
    scorer = functools.cache(lambda: LineScorer(model, precision, budget))
    with console().status("completing") as status:
        found = measure(tasks, names, scorer, budget, status.update, scores)
    by_package = {task.package: sum(one.package == task.package for one in tasks) for task in tasks}
    return result("completion", summary_rows(found), out, packages=by_package, budget=budget)
