"""Errors have a place, a finding and a remedy, and can be sent between processes."""

import pickle

import pytest

from lakh import errors
from lakh.errors import LakhError

ALL = [getattr(errors, name) for name in errors.__all__ if name != "from_dict"]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_pickling(kind: type[LakhError]) -> None:
    error = kind("here", "found", "todo")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", ALL)
def test_the_error_tree_names_every_error_and_its_exit_code(kind: type[LakhError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
    assert kind.exit_code in (1, 2, 65, 75)
    if kind in (errors.UserError, errors.DataError, errors.PeerError):
        assert f"{kind.__name__}" in (errors.__doc__ or "")
        assert f"exit {kind.exit_code}" in (errors.__doc__ or "")


def test_a_missing_extra_names_the_install_command() -> None:
    assert "pip install 'lakh[train]'" in str(errors.MissingExtra("lakh train", "torch", "train"))


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_a_round_trip_through_json(kind: type[LakhError]) -> None:
    error = kind("here", "found", "todo")
    again = errors.from_dict(error.as_dict())
    assert type(again) is kind
    assert (str(again), again.exit_code) == (str(error), error.exit_code)


@pytest.mark.parametrize("document", [{}, {"kind": "Mapping"}, {"kind": "NoSuch", "where": "w"}])
def test_an_unknown_error_document_is_still_an_error(document: dict) -> None:
    assert type(errors.from_dict(document)) is LakhError
