"""Completions from a model: lakh's own engine, or any OpenAI-compatible endpoint (endpoint.py).

n samples of every problem are n passes over all problems, pass i with seed + i: more samples do not change the first
ones. A call to the engine covers as many of them as keep it busy; a journal keeps finished calls. Needs no sandbox:
`write_generated` stores the samples and how they were made, for scoring on another machine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lakh import __version__, storage
from lakh.errors import UserError
from lakh.evals.generation.chat import program_of_answer
from lakh.evals.generation.samples import (
    CANONICAL,
    Sample,
    canonical_samples,
    fingerprint,
    read_samples,
    write_samples,
)
from lakh.evals.journal import Journal
from lakh.evals.scoring.protocol import Origin
from lakh.evals.task import Problem, Task

if TYPE_CHECKING:
    from lakh.evals.generation.endpoint import EndpointClient
    from lakh.server.offline import OfflineEngine
    from lakh.server.prompts.fim import Order

    CompletionGenerator = OfflineEngine | EndpointClient

__all__ = [
    "check_request",
    "generate",
    "generated",
    "load_engine",
    "origin_from",
    "samples_to_score",
    "write_generated",
]

GENERATED = "generated.json"
BATCHES_PER_CALL = 4  # so that the last, partly filled batch of a call matters little


def load_engine(model: str, *, chat: bool = False, served_name: str | None = None) -> CompletionGenerator:
    if model.startswith(("http://", "https://")):
        from lakh.evals.generation.endpoint import EndpointClient

        return EndpointClient(model, chat=chat, served_name=served_name)
    if chat:
        raise UserError("--chat", "is for endpoints", "give a URL as MODEL, or remove --chat")
    from lakh.server.offline import OfflineEngine

    return OfflineEngine.load(model)


def origin_from(model: str, *, chat: bool = False, strip_prompts: bool = False, **settings: Any) -> Origin:
    """From the options of the command line; `settings` are further fields of Origin."""
    is_endpoint = "://" in model
    if is_endpoint and settings.get("fill_order"):
        raise UserError("--fill-order", "is decided by the server", "remove it, or give weights as MODEL")
    form = None if not is_endpoint else "chat" if chat else "completions"
    return Origin(model, form=form, stripped=strip_prompts or None, **settings)


def check_request(task: Task, origin: Origin, n: int) -> None:
    """Raise for what cannot be generated, before a model is loaded."""
    if n > 1 and not origin.temperature:
        raise UserError(f"--n {n}", "at temperature 0 all samples are equal", "add e.g. --temperature 0.8")
    if origin.form == "chat" and task.is_infilling:
        raise UserError(f"task {task.name}", "cannot be generated in a chat", "remove --chat")


def generate(
    engine: CompletionGenerator, task: Task, origin: Origin, *, n: int = 1,
    progress: Callable[[int], None] | None = None, journal: Journal | None = None,
) -> list[Sample]:  # fmt: skip
    """n samples of every problem, those of one problem together. `progress` gets the number finished so far."""
    from lakh.server.engine import SamplingParams

    check_request(task, origin, n)
    max_tokens = origin.max_tokens or 256
    texts: list[str] = [text for call in journal.done for text in call] if journal else []
    prompts: list[Any] | None = None
    total = n * len(task.problems)

    def report(done: int) -> None:
        if progress:
            progress(len(texts) + done)

    while len(texts) < total:
        if prompts is None:
            prompts = [_prompt(engine, task, problem, origin, max_tokens) for problem in task.problems]
        numbers = range(len(texts), min(total, len(texts) + BATCHES_PER_CALL * engine.max_seqs))
        samplings = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=origin.temperature or 0.0,
                top_p=1.0 if origin.top_p is None else origin.top_p,
                seed=None if origin.seed is None else origin.seed + number // len(prompts),
                stop=() if origin.form == "chat" else task.stops,
            )
            for number in numbers
        ]
        asked = [prompts[number % len(prompts)] for number in numbers]
        completions = engine.generate(asked, samplings, stop_when=task.ended, progress=report)
        texts += [completion.text for completion in completions]
        if journal:
            journal.add([completion.text for completion in completions])
    stride = len(task.problems)
    written = [(problem, texts[at + index * stride]) for at, problem in enumerate(task.problems) for index in range(n)]
    if origin.form == "chat":
        return [
            Sample(one.id, program_of_answer(text, one.prompt, one.entry_point, one.language), whole=True)
            for one, text in written
        ]
    return [Sample(one.id, task.extract(text)) for one, text in written]


@contextlib.contextmanager
def generated(
    engine: CompletionGenerator, task: Task, origin: Origin, n: int, folder: str | None, progress: Callable[[int], None]
) -> Iterator[list[Sample]]:
    """The samples of `generate`, with a journal in `folder` that is removed when the block ends without an error."""
    key = {"task": task.name, "data": task.data_sha256, "problems": len(task.problems), **asdict(origin)}
    with contextlib.closing(Journal(f"{folder}/generated.journal.jsonl" if folder else None, key)) as journal:
        yield generate(engine, task, origin, n=n, progress=progress, journal=journal)
        journal.finish()


def write_generated(folder: str, task: Task, origin: Origin, samples: Sequence[Sample], *, seconds: float) -> str:
    """Write the samples, then generated.json with how they were made. Returns the path of the samples."""
    path = storage.join(folder, "samples.jsonl")
    storage.remove_tree(storage.join(folder, GENERATED))
    write_samples(path, samples)
    document = {
        "task": task.name,
        "data_sha256": task.data_sha256,
        "origin": asdict(origin),
        "samples": len(samples),
        "samples_sha256": fingerprint(samples),
        "seconds": round(seconds, 3),
        "lakh": __version__,
    }
    storage.write_bytes(storage.join(folder, GENERATED), (json.dumps(document, indent=1) + "\n").encode())
    return path


def origin_of(path: str, samples: Sequence[Sample]) -> Origin:
    """How these samples were made, if the generated.json next to their file is about them; otherwise only the path."""
    folder, _, _ = path.rpartition("/")
    document_path = storage.join(folder, GENERATED) if folder else GENERATED
    try:
        document = json.loads(storage.read_bytes(document_path)) if storage.exists(document_path) else {}
        if document.get("samples_sha256") == fingerprint(samples):
            return Origin(**document["origin"])
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # a foreign file with that name
    return Origin(path)


def samples_to_score(
    path: str | None, task: Task, *, partial: bool = False, n: int | None = None, limit: int | None = None
) -> tuple[Origin, list[Sample]]:
    """Samples of the first `limit` problems, and how they were made; without a path, the reference solutions."""
    samples = canonical_samples(task) if path is None else read_samples(path, task, partial=partial, n=n)
    origin = Origin(CANONICAL) if path is None else origin_of(path, samples)
    kept = {problem.id for problem in task.first(limit).problems}
    samples = [sample for sample in samples if sample.task_id in kept]
    if not samples and path is None:
        raise UserError(f"task {task.name}", "has no reference solutions here", "score samples instead")
    if not samples:
        raise UserError(str(path), f"has no sample for the first {limit} problems", "raise --limit")
    return origin, samples


def _prompt(engine: CompletionGenerator, task: Task, problem: Problem, origin: Origin, max_tokens: int) -> Any:
    if task.is_infilling:
        order: Order = "spm" if origin.fill_order == "spm" else "psm"
        return engine.infill(problem.prompt, problem.suffix, max_tokens, order)
    # Many tokenizers merge a newline with the indentation after it: a bare newline tells the model that none follows.
    text = problem.prompt.rstrip() if origin.stripped else problem.prompt
    if origin.form != "chat":
        return text
    from lakh.evals.generation.endpoint import ChatPrompt

    return ChatPrompt(text) if task.is_whole else ChatPrompt.to_complete(text, problem.language)
