"""Settings: strict reading, `--set`, and writing that can be read back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh import config
from lakh.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    """How fast."""
    kind: Literal["fast", "slow"] = "fast"
    pair: tuple[float, float] = (0.1, 0.2)

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ConfigError("rate", f"{self.rate} is above 1", "choose less")


@dataclass(frozen=True, kw_only=True)
class Item:
    size: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int = 3
    flag: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    maybe: int | None = None
    inner: Inner = field(default_factory=Inner)
    items: tuple[Item, ...] = ()


def build(data: dict, *sets: str) -> Outer:
    return config.with_sets(config.from_dict(Outer, data, origin="file.toml"), sets)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "x", "cuont": 1}, ["cuont (file.toml)", "no such setting", "did you mean count?"]),
        ({"name": "x", "inner": {"rat": 1}}, ["inner.rat (file.toml)", "did you mean inner.rate?"]),
        ({"name": "x", "count": "three"}, ["count (file.toml)", "'three' is not a whole number"]),
        ({"name": "x", "count": True}, ["count", "True is not a whole number"]),
        ({"name": "x", "flag": 1}, ["flag", "true or false"]),
        ({"name": "x", "inner": {"kind": "slwo"}}, ["inner.kind", "did you mean 'slow'?"]),
        ({"name": "x", "inner": {"rate": 2}}, ["inner.rate (file.toml)", "above 1", "choose less"]),
        ({"name": "x", "inner": {"pair": [1.0]}}, ["inner.pair"]),
        ({"name": "x", "inner": 3}, ["inner", "is not a table"]),
        ({"name": "x", "items": [{"size": "y"}]}, ["items[0].size"]),
        ({}, ["name (file.toml)", "is missing"]),
    ],
)
def test_errors_of_settings_have_a_path_a_finding_and_a_remedy(data: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(data)
    for word in words:
        assert word in str(caught.value)


def test_later_sets_win_and_record_their_source() -> None:
    assert build({"name": "x"}, "count=4", "count=5", "inner.rate=0.25", "inner.kind=slow").count == 5
    with pytest.raises(ConfigError, match="from --set"):
        build({"name": "x"}, "inner.rate=7")
    with pytest.raises(ConfigError, match="path=value"):
        build({"name": "x"}, "count")


def test_a_text_setting_takes_the_text_unchanged() -> None:
    assert build({"name": "x"}, "name=1e5").name == "1e5"


def test_large_numbers_may_be_written_as_floats() -> None:
    assert build({"name": "x", "count": 1e9}).count == 1_000_000_000


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.slow
@given(
    name=texts.filter(bool),
    count=st.integers(-(2**53), 2**53),
    flag=st.booleans(),
    labels=st.dictionaries(texts, texts, max_size=3),
    maybe=st.none() | st.integers(0, 9),
    rate=st.floats(0, 1),
    sizes=st.lists(st.integers(0, 9), max_size=3),
)
def test_settings_survive_a_round_trip(name, count, flag, labels, maybe, rate, sizes, tmp_path_factory) -> None:
    items = tuple(Item(size=size) for size in sizes)
    value = Outer(name=name, count=count, flag=flag, labels=labels, maybe=maybe, inner=Inner(rate=rate), items=items)
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(config.to_toml(value), encoding="utf-8")
    again = config.load(Outer, path)
    assert again == value
    assert config.fingerprint(again) == config.fingerprint(value)
    assert config.diff(value, again) == []


def test_field_docstrings_are_written_into_the_file() -> None:
    assert "# How fast.\nrate = 0.5" in config.to_toml(Outer(name="x"))
    assert "How fast." in {setting.doc for setting in config.settings(Outer)}


def test_classes_inside_others_and_without_a_source_file_are_written_too() -> None:
    @dataclass(frozen=True)
    class Rate:
        rate: float = 0.25
        """How slow."""

    assert config.to_toml(Rate()) == "# How slow.\nrate = 0.25\n"
    without_source = type("Typed", (), {"__annotations__": {"size": int}, "size": 3, "__module__": "nowhere"})
    assert config.to_toml(dataclass(without_source)()) == "size = 3\n"


def test_differences_are_listed_by_path() -> None:
    left, right = Outer(name="x"), Outer(name="x", inner=Inner(rate=0.1), maybe=2)
    assert config.diff(left, right) == [("inner.rate", 0.5, 0.1), ("maybe", None, 2)]


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", None])
def test_an_unreadable_file_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="run"):
        config.load(Outer, path)
