"""What ranks compare when their group forms, and how a disagreement reads."""

from lakh.spec import Run
from lakh.trainer.launch.agreement import LOCAL_SETTINGS, describe_differences, facts_digest, run_facts


def test_equal_differences_are_reported_once_with_their_ranks() -> None:
    where, found, _ = describe_differences(["", "seed is 2 and 1 on rank 0", "", "seed is 2 and 1 on rank 0"])
    assert where == "2 of 4 ranks disagree with rank 0"
    assert found == "ranks 1, 3: seed is 2 and 1 on rank 0"


def test_many_ranks_are_not_all_listed() -> None:
    _, found, _ = describe_differences(["", *["seed is 2 and 1 on rank 0"] * 1000])
    assert found == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 992 more: seed is 2 and 1 on rank 0"


def test_facts_hold_settings_and_versions_and_no_local_paths() -> None:
    facts = run_facts(Run(name="a"))
    assert {"optim.lr", "seed", "model.rope_base", "the code of lakh", "the version of torch"} <= facts.keys()
    assert not facts.keys() & set(LOCAL_SETTINGS)


def test_equal_numbers_of_another_type_agree() -> None:
    assert facts_digest({"train.peer_timeout_s": 60}) == facts_digest({"train.peer_timeout_s": 60.0})
    assert facts_digest({"optim.lr": 0.5}) != facts_digest({"optim.lr": 0.25})
