"""lakh plan audit: recompute the claims of an article and mark each one."""

from __future__ import annotations

import click

from lakh.cli.output import CommandResult, print_result, table

__all__ = ["audit"]


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--seed", is_flag=True, help="The claims of the article that lakh began with, and a Llama 3 erratum.")
@print_result
def audit(file: str | None, seed: bool) -> CommandResult:
    """Recompute the claims of an article and mark each one."""
    from lakh.errors import UserError
    from lakh.planner.audit import audit as judge
    from lakh.planner.audit import load_claims

    if (file is None) == (not seed):
        raise UserError("lakh plan audit", "needs one of FILE and --seed", "give a claims file (TOML), or --seed")
    claims = load_claims(file)
    found = judge(claims)
    data = {"title": claims.title, "claims": [verdict.as_dict() for verdict in found]}
    rows = [
        [
            v.verdict,
            f"{v.id}. {v.claim}\nstated {v.stated:,.6g}, right {v.right:,.6g} {v.unit}  [{v.formula}]\n{v.reason}\n",
        ]
        for v in found
    ]
    return CommandResult(data, table(["verdict", "claim, figures, why"], rows, claims.title))
