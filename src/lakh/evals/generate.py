"""Completions from lakh's own engine. The only file of this room that reaches a model, and only when it is called.

n samples of every problem are n passes over all problems, pass i with seed + i: a pass is one batch for the engine, and
asking for more samples later leaves the first ones as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lakh.errors import UserError
from lakh.evals.protocol import Origin
from lakh.evals.samples import Sample
from lakh.evals.task import Task, cut_at_stops

if TYPE_CHECKING:
    from lakh.server.engine import Completion, Sampling

__all__ = ["Generator", "check_request", "generate", "load_engine"]


class Generator(Protocol):
    """The part of the engine that is used here."""

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, *, progress: Callable[[int], None] | None = None
    ) -> list[Completion]: ...


def load_engine(model: str) -> Generator:
    if model.startswith(("http://", "https://")):
        todo = "collect samples from it yourself and score them with: lakh eval score SAMPLES.jsonl"
        raise UserError(model, "models behind a URL cannot be evaluated yet", todo)
    from lakh.server.engine import Engine

    return Engine.load(model)


def check_request(task: Task, origin: Origin, n: int) -> None:
    """Refuse what cannot be generated, before a model is loaded for it."""
    if n > 1 and not origin.temperature:
        raise UserError(f"--n {n}", "at temperature 0 all samples are equal", "add e.g. --temperature 0.8")
    if any(problem.suffix for problem in task.problems):
        raise UserError(f"task {task.name}", "infilling is not generated yet", "choose another task")


def generate(
    engine: Generator,
    task: Task,
    origin: Origin,
    *,
    n: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """n samples of every problem, those of one problem together. `progress` hears how many are finished so far."""
    from lakh.server.engine import Sampling

    check_request(task, origin, n)
    prompts = [problem.prompt for problem in task.problems]
    passes = []
    for index in range(n):
        sampling = Sampling(
            max_tokens=origin.max_tokens or 256,
            temperature=origin.temperature or 0.0,
            top_p=1.0 if origin.top_p is None else origin.top_p,
            seed=None if origin.seed is None else origin.seed + index,
            stop=task.stops,
        )
        tell = None if progress is None else _after(progress, index * len(prompts))
        passes.append(engine.generate(prompts, sampling, progress=tell))
    return [
        Sample(problem.id, cut_at_stops(completions[at].text, task.stops))
        for at, problem in enumerate(task.problems)
        for completions in passes
    ]


def _after(progress: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda done: progress(before + done)
