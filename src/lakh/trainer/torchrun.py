"""torchrun with the exit code of the rank that failed first: `python -m lakh.trainer.torchrun ...`.

torchrun itself always exits with 1. Slurm and Kubernetes decide by the exit code whether to retry (2 and 65: it would
fail again; 75: retry). Takes torchrun's arguments. Exits with 75 after a stop signal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from lakh.errors import PeerError

__all__ = ["exit_code", "main"]


def exit_code(ranks: Iterable[tuple[float, int]]) -> int:
    """The exit code for ranks that ended at these times with these codes (negative for a signal).

    The first rank with an error of its own counts before ranks that lost a peer or were killed.
    """
    causes = [code for _, code in sorted(ranks) if code > 0 and code != PeerError.exit_code]
    return causes[0] if causes else PeerError.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # noqa: T201 - torchrun's table of failures
        return exit_code((failure.timestamp, failure.exitcode) for failure in error.failures.values())
    except SignalException as error:
        print(f"stopped by {error.sigval.name}", file=sys.stderr)  # noqa: T201
        return PeerError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
