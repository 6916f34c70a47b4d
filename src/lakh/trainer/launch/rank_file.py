"""A rank file: host names in the order of their node ranks, one per line.

`lakh plan place` writes it, `python -m lakh.trainer.torchrun --rank-file` reads it, and so does Slurm as SLURM_HOSTFILE
with --distribution=arbitrary. Lines that start with # are comments.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from lakh.errors import UserError

__all__ = ["node_rank", "rank_file_text", "read_rank_file"]


def rank_file_text(hosts: Sequence[str], comment: str = "") -> str:
    lines = [f"# {line}" for line in comment.splitlines()]
    return "\n".join([*lines, *hosts]) + "\n"


def read_rank_file(path: str | Path) -> list[str]:
    """Hosts in the order of their node ranks."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"rank file {path}", f"cannot be read ({error})", "check the path") from None
    hosts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not hosts or len(set(hosts)) < len(hosts):
        found = "names no host" if not hosts else "names a host twice"
        raise UserError(f"rank file {path}", found, "give one host per line, each once")
    return hosts


def node_rank(hosts: Sequence[str], name: str | None = None) -> int:
    """Node rank of this host, by its name with or without the domain."""
    name = name or socket.gethostname()
    for candidate in (name, name.split(".", 1)[0]):
        for rank, host in enumerate(hosts):
            if candidate in (host, host.split(".", 1)[0]):
                return rank
    raise UserError(f"host {name}", "is not in the rank file", f"add it, or start on one of {', '.join(hosts[:4])} ...")
