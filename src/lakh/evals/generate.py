"""Completions from a model: lakh's own engine (server/offline.py), or any endpoint that speaks OpenAI's language
(endpoint.py).

n samples of every problem are n passes over all problems, pass i with seed + i: asking for more samples later leaves
the first ones as they were. A call to the generator is as many passes as keep it busy. With a journal, finished passes
are not asked for again.

Needs no sandbox: `write_generated` keeps the samples and how they were made, for scoring on another machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from lakh import __version__, storage
from lakh.errors import UserError
from lakh.evals.journal import Journal
from lakh.evals.protocol import Origin
from lakh.evals.samples import Sample, fingerprint, write_samples
from lakh.evals.task import Problem, Task

if TYPE_CHECKING:
    from lakh.server.engine import Completion, SamplingParams
    from lakh.server.prompts.fim import Order

__all__ = [
    "GENERATED",
    "Generator",
    "check_request",
    "code_block",
    "generate",
    "load_engine",
    "origin_from",
    "origin_of",
    "write_generated",
]

GENERATED = "generated.json"
BATCHES_PER_CALL = 4  # so that the last, half-empty batch of a call weighs little


class Generator(Protocol):
    """What is asked for completions."""

    max_seqs: int
    """How many it works on at one time."""

    def generate(
        self,
        prompts: Sequence[Any],
        samplings: Sequence[SamplingParams],
        *,
        stop_when: Callable[[str], bool] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One sampling for each prompt. A text for which `stop_when` holds may be left at that."""
        ...

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: Order = "psm") -> Any: ...


def load_engine(model: str, *, chat: bool = False, served_name: str | None = None) -> Generator:
    if model.startswith(("http://", "https://")):
        from lakh.evals.endpoint import Endpoint

        return Endpoint(model, chat=chat, served_name=served_name)
    if chat:
        raise UserError("--chat", "is for endpoints", "give a URL as MODEL, or leave --chat out")
    from lakh.server.offline import OfflineEngine

    return OfflineEngine.load(model)


def origin_from(
    model: str,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    max_tokens: int,
    chat: bool = False,
    served_name: str | None = None,
    strip_prompts: bool = False,
    fill_order: str | None = None,
) -> Origin:
    is_endpoint = "://" in model
    if is_endpoint and fill_order:
        raise UserError("--fill-order", "is the server's own choice", "leave it out, or give weights as MODEL")
    form = None if not is_endpoint else "chat" if chat else "completions"
    return Origin(
        model,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        form=form,
        served_name=served_name,
        stripped=strip_prompts or None,
        fill_order=fill_order,
    )


def check_request(task: Task, origin: Origin, n: int) -> None:
    """Refuse what cannot be generated, before a model is loaded for it."""
    if n > 1 and not origin.temperature:
        raise UserError(f"--n {n}", "at temperature 0 all samples are equal", "add e.g. --temperature 0.8")
    if origin.form == "chat" and task.is_infilling:
        raise UserError(f"task {task.name}", "cannot be asked in a chat", "leave --chat out")


def generate(
    engine: Generator,
    task: Task,
    origin: Origin,
    *,
    n: int = 1,
    progress: Callable[[int], None] | None = None,
    journal: Journal | None = None,
) -> list[Sample]:
    """n samples of every problem, those of one problem together. `progress` hears how many are finished so far."""
    from lakh.server.engine import SamplingParams

    check_request(task, origin, n)
    max_tokens = origin.max_tokens or 256
    passes: list[list[str]] = list(journal.done)[:n] if journal else []
    prompts = None
    at_once = max(1, BATCHES_PER_CALL * engine.max_seqs // len(task.problems))
    while len(passes) < n:
        if prompts is None:
            prompts = [_prompt(engine, task, problem, origin, max_tokens) for problem in task.problems]
        first, num = len(passes), min(at_once, n - len(passes))
        samplings = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=origin.temperature or 0.0,
                top_p=1.0 if origin.top_p is None else origin.top_p,
                seed=None if origin.seed is None else origin.seed + index,
                stop=() if origin.form == "chat" else task.stops,
            )
            for index in range(first, first + num)
        ]
        completions = engine.generate(
            prompts * num,
            [sampling for sampling in samplings for _ in prompts],
            stop_when=task.ended,
            progress=None if progress is None else _after(progress, first * len(prompts)),
        )
        texts = [completion.text for completion in completions]
        for start in range(0, len(texts), len(prompts)):
            passes.append(texts[start : start + len(prompts)])
            if journal:
                journal.add(passes[-1])
    return [
        _sample(task, problem, texts[at], chat=origin.form == "chat")
        for at, problem in enumerate(task.problems)
        for texts in passes
    ]


def write_generated(folder: str, task: Task, origin: Origin, samples: Sequence[Sample], *, seconds: float) -> str:
    """Samples, and beside them how they were made; the latter last. Returns the samples' path."""
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
    """How these samples were made, where that is told beside their file and is told of them; else only the file."""
    folder, _, _ = path.rpartition("/")
    beside = storage.join(folder, GENERATED) if folder else GENERATED
    try:
        document = json.loads(storage.read_bytes(beside)) if storage.exists(beside) else {}
        if document.get("samples_sha256") == fingerprint(samples):
            return Origin(**document["origin"])
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # a file of somebody else's by that name
    return Origin(path)


def _prompt(engine: Generator, task: Task, problem: Problem, origin: Origin, max_tokens: int) -> Any:
    if task.is_infilling:
        order: Order = "spm" if origin.fill_order == "spm" else "psm"
        return engine.infill(problem.prompt, problem.suffix, max_tokens, order)
    # Many tokenizers join a line's end with the indentation after it: a lone end of line then says that none follows.
    return problem.prompt.rstrip() if origin.stripped else problem.prompt


def _sample(task: Task, problem: Problem, text: str, *, chat: bool) -> Sample:
    if chat:
        return Sample(problem.id, code_block(text), whole=True)
    return Sample(problem.id, task.extract(text))


def code_block(text: str) -> str:
    """The first fenced block of an answer, or all of it where nothing is fenced."""
    found = re.search(r"```[^\n]*\n(.*?)(?:\n```|\Z)", text, flags=re.DOTALL)
    return found.group(1) if found else text


def _after(progress: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda done: progress(before + done)
