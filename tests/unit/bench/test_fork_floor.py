"""The floor that judging speed is held against: it runs every program, and notices one that fails."""

from bench.eval.fork_floor import fork_each


def test_every_program_has_a_process_of_its_own_and_is_counted() -> None:
    right = ("count = []\n", "count.append(1)\nassert count == [1]\nprint('not to the caller')\n")
    assert fork_each([right, right, ("", "assert False\n"), ("x = 1 +\n", "")], workers=2) == 2
