"""lakh corpus synthesize: programs with tests from a model, kept if they pass in the sandbox."""

from __future__ import annotations

import click

from lakh import config
from lakh.cli.complete import complete_folders, complete_runs
from lakh.cli.output import CommandResult, print_result, print_warning, set_option
from lakh.cli.progress import progress_bar

__all__ = ["synthesize_command"]


@click.command("synthesize")
@click.argument("model", metavar="MODEL", shell_complete=complete_runs)
@click.option("--out", required=True, metavar="DIR", shell_complete=complete_folders, help="Folder for the result.")
@click.option("--attempts", type=click.IntRange(min=1), default=200, show_default=True, help="Programs to ask for.")
@click.option("--topics", metavar="FILE", help="Topics, one a line; default: a list that comes with lakh.")
@click.option("--chat", is_flag=True, help="Use an endpoint's chat API and take the code block of its answer.")
@click.option("--served-name", metavar="NAME", help="Model at an endpoint; default: the first that it lists.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0))
@click.option("--top-p", default=0.95, show_default=True, type=click.FloatRange(min=0, max=1, min_open=True))
@click.option("--max-tokens", default=1024, show_default=True, type=click.IntRange(min=1), help="Per answer.")
@click.option("--seed", default=0, show_default=True, type=int, help="Seed of the first attempt.")
@click.option("--workers", type=click.IntRange(min=1), help="Programs at one time; default: one per CPU.")
@click.option("--sandbox", "backend", metavar="NAME", help="Isolation; default: the strongest here.")
@click.option("--unsafe", is_flag=True, help="Run without a sandbox: model-written code gets your rights.")
@set_option
@print_result
def synthesize_command(
    model: str,
    out: str,
    attempts: int,
    topics: str | None,
    chat: bool,
    served_name: str | None,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    workers: int | None,
    backend: str | None,
    unsafe: bool,
    sets: tuple[str, ...],
) -> CommandResult:
    """Make a corpus of programs that a model writes and that pass their tests.

    MODEL is a URL of an OpenAI-compatible server, or a run, a checkpoint, a Hugging Face directory or a GGUF file. Asks
    for Python modules with tests, runs each in the sandbox, drops programs whose tests fail or check nothing, removes
    duplicates and tasks of benchmarks, and records model, prompt and verdict with each document. After a stop the same
    command continues. Settings for --set are those of lakh corpus build.
    """
    from lakh.corpus import Settings
    from lakh.evals.sandbox import Sandbox
    from lakh.synthesis import SynthesisRequest, read_topics, synthesize
    from lakh.synthesis.prompts import TOPICS

    request = SynthesisRequest(
        model=model,
        chat=chat,
        served_name=served_name,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        topics=read_topics(topics) if topics else TOPICS,
    )
    settings = config.with_sets(Settings(), sets, origin="corpus settings")
    if unsafe:
        print_warning("--unsafe runs model-written code with your rights and your network")
    with Sandbox.choose(unsafe=unsafe, backend=backend) as sandbox, progress_bar() as progress:
        result = synthesize(request, out, attempts, sandbox, workers=workers, settings=settings, progress=progress)
    verdicts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(result.verdicts.items()))
    text = f"{out}: {result.attempts:,} attempts of {result.model}: {verdicts}\n"
    text += f"{result.report.out}: {result.report.kept:,} programs kept"
    return CommandResult(result.as_dict(), text, next_commands=[f"lakh corpus report {result.report.out}"])
