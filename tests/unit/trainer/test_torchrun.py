"""The exit code of torchrun is that of the rank that caused the failure; schedulers decide by it."""

import subprocess
import sys

import pytest

from lakh.trainer.torchrun import exit_code


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([(1.0, 2)], 2),
        ([(2.0, -15), (1.0, 2)], 2),  # ended because of the other
        ([(1.0, 75), (2.0, 65)], 65),  # lost its peer first, but the peer has the cause
        ([(2.0, 2), (1.0, 65)], 65),
        ([(1.0, -9), (2.0, 75)], 75),
        ([(1.0, 1)], 1),
    ],
)
def test_a_rank_with_its_own_error_counts_before_ranks_that_lost_a_peer(ranks, code: int) -> None:
    assert exit_code(ranks) == code


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchrun_exits_with_the_code_of_its_rank() -> None:
    command = [sys.executable, "-m", "lakh.trainer.torchrun", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*command, "-m", "lakh", "checkpoint", "list", "/nowhere/at/all"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "no such folder" in done.stderr
