"""lakh plan audit: recompute the claims of an article and mark each one."""

from __future__ import annotations

import click

from lakh.cli.output import CommandResult, print_result, table

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
    data = {"title": claims.title, "claims": [check.as_dict() for check in found]}
    rows = [
        [
            v.verdict,
            f"{v.id}. {v.claim}\nstated {v.stated:,.6g}, right {v.right:,.6g} {v.unit}  [{v.formula}]\n{v.reason}\n",
        ]
        for v in found
    ]
    return CommandResult(data, table(["verdict", "claim, figures, why"], rows, claims.title))
