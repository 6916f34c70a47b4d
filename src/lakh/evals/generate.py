"""Completions from a model: lakh's own engine, or any endpoint that speaks OpenAI's language (endpoint.py).

n samples of every problem are n passes over all problems, pass i with seed + i: a pass is one batch for the engine, and
asking for more samples later leaves the first ones as they were. With a journal, finished passes are not asked for
again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lakh.errors import UserError
from lakh.evals.journal import Journal
from lakh.evals.protocol import Origin
from lakh.evals.samples import Sample
from lakh.evals.task import Problem, Task

if TYPE_CHECKING:
    from lakh.server.engine import Completion, Sampling

__all__ = ["Generator", "check_request", "code_block", "generate", "load_engine"]


class Generator(Protocol):
    """The part of the engine that is used here."""

    def generate(
        self, prompts: Sequence[Any], sampling: Sampling, *, progress: Callable[[int], None] | None = None
    ) -> list[Completion]: ...

    def infill(self, prefix: str, suffix: str, max_tokens: int) -> Any: ...


def load_engine(model: str, *, chat: bool = False, served_name: str | None = None) -> Generator:
    if model.startswith(("http://", "https://")):
        from lakh.evals.endpoint import Endpoint

        return Endpoint(model, chat=chat, served_name=served_name)
    if chat:
        raise UserError("--chat", "is for endpoints", "give a URL as MODEL, or leave --chat out")
    from lakh.server.engine import Engine

    return Engine.load(model)


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
    from lakh.server.engine import Sampling

    check_request(task, origin, n)
    max_tokens = origin.max_tokens or 256
    passes: list[list[str]] = list(journal.done)[:n] if journal else []
    prompts = None
    for index in range(len(passes), n):
        if prompts is None:
            prompts = [_prompt(engine, task, problem, max_tokens) for problem in task.problems]
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=origin.temperature or 0.0,
            top_p=1.0 if origin.top_p is None else origin.top_p,
            seed=None if origin.seed is None else origin.seed + index,
            stop=() if origin.form == "chat" else task.stops,
        )
        tell = None if progress is None else _after(progress, index * len(prompts))
        texts = [completion.text for completion in engine.generate(prompts, sampling, progress=tell)]
        passes.append(texts)
        if journal:
            journal.add(texts)
    return [
        _sample(task, problem, texts[at], chat=origin.form == "chat")
        for at, problem in enumerate(task.problems)
        for texts in passes
    ]


def _prompt(engine: Generator, task: Task, problem: Problem, max_tokens: int) -> Any:
    if task.is_infilling:
        return engine.infill(problem.prompt, problem.suffix, max_tokens)
    return problem.prompt


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
