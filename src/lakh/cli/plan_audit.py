"""lakh plan audit: recompute the claims of an article and mark each one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lakh.cli.output import CommandResult, print_result, table

if TYPE_CHECKING:
    from lakh.planner.validation.claims_audit import ClaimCheck

__all__ = ["audit"]


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--seed", is_flag=True, help="The claims of the article that lakh started from, and a Llama 3 erratum.")
@print_result
def audit(file: str | None, seed: bool) -> CommandResult:
    """Recompute the claims of an article and mark each one."""
    from lakh.errors import UserError
    from lakh.planner.validation import claims_audit

    if (file is None) == (not seed):
        raise UserError("lakh plan audit", "needs one of FILE and --seed", "give a claims file (TOML), or --seed")
    claims = claims_audit.load_claims(file)
    found = claims_audit.audit(claims)
    data = {"title": claims.title, "claims": [asdict(check) for check in found]}
    rows = [(check.verdict, _text(check)) for check in found]
    return CommandResult(data, table(["verdict", "claim, figures, why"], rows, claims.title))


def _text(check: ClaimCheck) -> str:
    figures = f"stated {check.stated:,.6g}, right {check.right:,.6g} {check.unit}  [{check.formula}]"
    return f"{check.id}. {check.claim}\n{figures}\n{check.reason}\n"
