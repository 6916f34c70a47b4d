"""What the drill calls wrong: a result of nobody's average, and two results among those who go on."""

from lakh.c3.chaos import wrong_sums


def step(pid: int, number: int, *values: float) -> dict:
    return {"kind": "step", "pid": pid, "step": number, "values": list(values)}


def epoch(pid: int, *members: int) -> dict:
    return {"kind": "epoch", "pid": pid, "members": list(members)}


def done(pid: int) -> dict:
    return {"kind": "done", "pid": pid}


def test_members_that_agree_are_right() -> None:
    assert wrong_sums([step(1, 1, 1.5), step(2, 1, 1.5), step(1, 2, 3.0), done(1), done(2)], 2) == []


def test_two_results_among_those_who_go_on_are_wrong() -> None:
    facts = [epoch(1, 0, 1), step(1, 1, 1.5), done(1), step(2, 1, 2.0), done(2)]
    assert wrong_sums(facts, 3) == ["step 1: members saw [(1.5,), (2.0,)]"]


def test_one_that_is_lost_may_have_passed_a_commit_alone() -> None:
    """Member 2 was cut off when the others had not heard that it has everything: they do the step again without it."""
    facts = [step(3, 1, 2.0), epoch(1, 0, 1), epoch(2, 0, 1), step(1, 1, 1.5), step(2, 1, 1.5), done(1), done(2)]
    assert wrong_sums(facts, 3) == []
    facts.append(step(3, 2, 4.0))  # it went on, alone
    assert wrong_sums(facts, 3) == ["step 1: members saw [(1.5,), (2.0,)]"]


def test_what_is_nobodys_average_is_wrong_whoever_says_it() -> None:
    assert wrong_sums([step(1, 1, 1.7)], 2) == ["step 1: (1.7,) is the average of no epoch ([1.5])"]
    assert wrong_sums([step(1, 1, 1.5, 2.0), done(1)], 2) == ["step 1: (1.5, 2.0) is the average of no epoch ([1.5])"]
