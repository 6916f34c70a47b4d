"""Settings that may change on resume: every setting has a rule, and the model and the data order are fixed."""

import pytest

from lakh import config
from lakh.errors import UserError
from lakh.spec import Run
from lakh.trainer.recovery.resume_rules import FIXED, MAY_CHANGE, check_changes, reason_fixed

SETTINGS = [item.path for item in config.settings(Run)]


def covers(entry: str, path: str) -> bool:
    return path == entry or path.startswith(f"{entry}.")


def test_every_setting_has_a_rule_and_every_rule_a_setting() -> None:
    entries = [*FIXED, *MAY_CHANGE]
    assert len(entries) == len(set(entries))
    assert [path for path in SETTINGS if not any(covers(entry, path) for entry in entries)] == []
    assert [entry for entry in entries if not any(covers(entry, path) for path in SETTINGS)] == []


def test_an_unknown_setting_is_refused() -> None:
    assert reason_fixed("data.new_setting") == "no rule allows it to change"


@pytest.mark.parametrize(
    "change",
    [
        "model.layers=3",
        "model.heads=2",
        "model.rope_base=50000",
        "model.norm_eps=1e-6",
        "model.tied=false",
        "data.document_mask=true",
        "data.fim_rate=0.5",
        "seed=2",
        "optim.kind=muon",
    ],
)
def test_a_change_of_the_model_or_of_the_data_is_refused(change: str) -> None:
    before = Run(name="a")
    path, _, _ = change.partition("=")
    with pytest.raises(UserError) as caught:
        check_changes(before, config.with_sets(before, [change]))
    assert caught.value.where.startswith(f"{path} = ")
    assert "start a new run" in caught.value.todo


def test_other_changes_are_listed() -> None:
    before = Run(name="a")
    after = config.with_sets(before, ["optim.lr=1e-4", "train.steps=900", "mesh.tp=2"])
    assert [path for path, _, _ in check_changes(before, after)] == ["mesh.tp", "optim.lr", "train.steps"]
