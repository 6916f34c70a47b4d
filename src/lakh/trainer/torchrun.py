"""torchrun that ends with the exit code of the rank that knows the cause: `python -m lakh.trainer.torchrun ...`.

torchrun itself ends with 1, whatever its ranks ended with; whether to try again is decided by that code in Slurm and
Kubernetes (2 and 65: the same would happen again; 75: try again). Takes torchrun's own arguments. Asked to stop by a
signal, it ends with 75 when its ranks have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from lakh.errors import PeerError

__all__ = ["exit_code", "main"]


def exit_code(ranks: Iterable[tuple[float, int]]) -> int:
    """What to end with, given when each rank of this machine ended (any clock) and its code, negative for a signal.

    A rank that names a cause counts before those that lost their peer or were ended because of it.
    """
    named = [code for _, code in sorted(ranks) if code > 0 and code != PeerError.exit_code]
    return named[0] if named else PeerError.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # noqa: T201 - torchrun's own table of who failed
        return exit_code((failure.timestamp, failure.exitcode) for failure in error.failures.values())
    except SignalException as error:
        print(f"stopped by {error.sigval.name}", file=sys.stderr)  # noqa: T201
        return PeerError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
