"""torchrun with the exit code of the rank that failed first: `python -m lakh.trainer.torchrun ...`.

torchrun itself always exits with 1. Slurm and Kubernetes decide by the exit code whether to retry (2 and 65: it would
fail again; 75: retry). Takes torchrun's arguments. Exits with 75 after a stop signal.

`--rank-file FILE`, as `lakh plan place` writes it, gives every host its node rank: the first host of the file is the
master, and the number of hosts is --nnodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from lakh.errors import PeerError, UserError
from lakh.trainer.launch.rank_file import node_rank, read_rank_file

__all__ = ["exit_code", "main", "with_rank_file"]


def exit_code(ranks: Iterable[tuple[float, int]]) -> int:
    """The exit code for ranks that ended at these times with these codes (negative for a signal).

    The first rank with an error of its own counts before ranks that lost a peer or were killed.
    """
    causes = [code for _, code in sorted(ranks) if code > 0 and code != PeerError.exit_code]
    return causes[0] if causes else PeerError.exit_code


def with_rank_file(arguments: Sequence[str], host: str | None = None) -> list[str]:
    """torchrun's arguments with `--rank-file FILE` (before the program) replaced by the node rank of this host."""
    words = list(arguments)
    program = next((i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    at = next((i for i, word in enumerate(words[:program]) if word.split("=", 1)[0] == "--rank-file"), None)
    if at is None:
        return words
    _, _, path = words[at].partition("=")
    taken = 1 if path else 2
    if not path and at + 1 >= program:
        raise UserError("--rank-file", "names no file", "give the file that lakh plan place wrote")
    hosts = read_rank_file(path or words[at + 1])
    given = [f"--nnodes={len(hosts)}", f"--node-rank={node_rank(hosts, host)}", f"--master-addr={hosts[0]}"]
    return [*words[:at], *given, *words[at + taken :]]


def main(arguments: Sequence[str] | None = None) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(with_rank_file(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # noqa: T201 - torchrun's table of failures
        return exit_code((failure.timestamp, failure.exitcode) for failure in error.failures.values())
    except SignalException as error:
        print(f"stopped by {error.sigval.name}", file=sys.stderr)  # noqa: T201
        return PeerError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
