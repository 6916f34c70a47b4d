"""Schedulers decide by the exit code: it is that of the rank that knows the cause."""

import subprocess
import sys

import pytest

from lakh.trainer.torchrun import exit_code


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([(1.0, 2)], 2),
        ([(2.0, -15), (1.0, 2)], 2),  # ended because of the other
        ([(1.0, 75), (2.0, 65)], 65),  # lost its peer first, but the peer knows why
        ([(2.0, 2), (1.0, 65)], 65),
        ([(1.0, -9), (2.0, 75)], 75),
        ([(1.0, 1)], 1),
    ],
)
def test_a_rank_that_names_a_cause_counts_before_those_that_fell_with_it(ranks, code: int) -> None:
    assert exit_code(ranks) == code


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchrun_ends_with_the_code_of_its_rank() -> None:
    command = [sys.executable, "-m", "lakh.trainer.torchrun", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*command, "-m", "lakh", "checkpoint", "list", "/nowhere/at/all"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "no such folder" in done.stderr
