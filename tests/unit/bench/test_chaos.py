"""The chaos test reports a result that is no average, and two results of one step among members that continue."""

from bench.comm.chaos import find_wrong_sums


def step(pid: int, number: int, *values: float) -> dict:
    return {"kind": "step", "pid": pid, "step": number, "values": list(values)}


def epoch(pid: int, *members: int) -> dict:
    return {"kind": "epoch", "pid": pid, "members": list(members)}


def done(pid: int) -> dict:
    return {"kind": "done", "pid": pid}


def test_results_that_agree_are_correct() -> None:
    assert find_wrong_sums([step(1, 1, 1.5), step(2, 1, 1.5), step(1, 2, 3.0), done(1), done(2)], 2) == []


def test_two_results_among_members_that_continue_are_wrong() -> None:
    records = [epoch(1, 0, 1), step(1, 1, 1.5), done(1), step(2, 1, 2.0), done(2)]
    assert find_wrong_sums(records, 3) == ["step 1: members saw [(1.5,), (2.0,)]"]


def test_a_lost_member_may_have_passed_a_commit_alone() -> None:
    """Member 2 was disconnected before the others learned that it has all results: they repeat the step without it."""
    records = [step(3, 1, 2.0), epoch(1, 0, 1), epoch(2, 0, 1), step(1, 1, 1.5), step(2, 1, 1.5), done(1), done(2)]
    assert find_wrong_sums(records, 3) == []
    records.append(step(3, 2, 4.0))  # it continued alone
    assert find_wrong_sums(records, 3) == ["step 1: members saw [(1.5,), (2.0,)]"]


def test_a_value_that_is_no_average_is_wrong() -> None:
    assert find_wrong_sums([step(1, 1, 1.7)], 2) == ["step 1: (1.7,) is the average of no epoch ([1.5])"]
    assert find_wrong_sums([step(1, 1, 1.5, 2.0), done(1)], 2) == [
        "step 1: (1.5, 2.0) is the average of no epoch ([1.5])"
    ]
