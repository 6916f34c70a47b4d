"""Values exchanged by candidate and examiner: plain data keeps its types, anything else is rejected."""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.evals.sandboxed import messages, packed_rows, values

numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | st.text() | st.binary()
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=12,
)


def refuse(value: Any) -> Any:
    raise TypeError(f"{value!r} is no plain data")


def through(value: Any) -> Any:
    return values.decode(json.loads(json.dumps(values.encode(value, refuse))), refuse)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


@given(plain)
def test_plain_data_is_decoded_with_its_types(value: Any) -> None:
    assert repr(through(value)) == repr(value) or same(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        Counter("hello"),
        OrderedDict(a=1),
        deque([1, 2], 5),
        Decimal("1.50"),
        Fraction(1, 3),
        date(2024, 2, 29),
        datetime(2024, 2, 29, 1, 2, 3),
        timedelta(1, 2, 3),
        range(1, 9, 2),
        10**5000,
        -(10**5000),
        bytearray(b"x"),
        int,
        "\ud800",
    ],
    ids=lambda value: type(value).__name__,
)
def test_library_types_are_decoded_with_their_types(value: Any) -> None:
    assert same(through(value), value)


def test_nan_and_defaultdict_are_decoded() -> None:
    assert math.isnan(through(float("nan")))
    assert through(defaultdict(int, a=1)) == {"a": 1}


def test_a_subclass_is_sent_as_its_plain_type() -> None:
    class Sly(list):
        def __eq__(self, other: object) -> bool:
            return True

        def __iter__(self):
            return iter(["lies"])

        __hash__ = None  # type: ignore[assignment]

    class SlyInt(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert same(through(Sly([1, 2])), [1, 2])
    assert same(through(SlyInt(7)), 7)
    assert same(through(namedtuple("Point", "x y")(1, 2)), (1, 2))


def test_other_objects_become_handles_or_errors() -> None:
    with pytest.raises(TypeError):
        values.encode(object(), refuse)
    assert values.encode([object()], lambda value: ["h", 0]) == ["l", ["h", 0]]
    assert values.decode(["l", ["h", 3]], lambda number: f"thing {number}") == ["thing 3"]


@pytest.mark.parametrize(
    "form", [[], {}, ["?"], ["d", 1], ["b", "zz"], ["x", "os.system", "id"], ["y", "print"], ["i"], ["s", ["l"]], ["h"]]
)
def test_malformed_values_are_rejected(form: Any) -> None:
    with pytest.raises((ValueError, TypeError, IndexError, KeyError)):
        values.decode(form, lambda number: None)


def test_a_message_that_is_too_long_is_rejected_before_it_is_read() -> None:
    read, write = os.pipe()
    os.write(write, (1 << 60).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="too large"):
        messages.MessageReader(read).next()
    os.close(write)
    assert messages.MessageReader(read).next() is None
    os.close(read)


def test_messages_are_reassembled_from_any_fragments() -> None:
    read, write = os.pipe()
    sent = [b"", b"one", b"x" * 9000, b"two"]
    for body in sent:
        messages.send_bytes(write, body)
    whole = os.read(read, 1 << 16)
    inbox = messages.MessageReader(read)
    for part in (whole[:3], whole[3:11], whole[11:5000], whole[5000:]):
        os.write(write, part)
    found = [inbox.next() for _ in sent]
    os.write(write, b"half")
    os.close(write)
    assert found == sent
    assert inbox.next() is None
    os.close(read)


@given(plain)
def test_to_json_equals_the_json_module(value: Any) -> None:
    form = values.encode(value, refuse)
    text = messages.to_json(form)
    assert text == json.dumps(form, separators=(",", ":"))
    assert messages.to_json(messages.parse_json(text)) == text


@pytest.mark.parametrize("text", ["", "[1", "[1] ", "[1][2]", "nothing", "{'a': 1}"])
def test_invalid_json_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        messages.parse_json(text)


@pytest.mark.parametrize("kind", [list, tuple])
def test_many_rows_over_few_objects_are_short_and_keep_their_types(kind: Any) -> None:
    objects = (1, True, 1.0, -0.0, 0.0, None, "", "a\ud800")
    rows = kind(itertools.product(objects, repeat=5))
    form = values.encode(rows, refuse)
    assert form[0] == "p"
    assert len(messages.to_json(form)) < len(rows) * len(rows[0])
    assert repr(through(rows)) == repr(rows)
    assert type(through(rows)) is kind


@pytest.mark.parametrize(
    "last", [(1,), [1, 2], (1, 2, 3), (1, (2,)), (1, 10**30), (1, bytearray(b"x")), 7], ids=lambda last: repr(last)
)
def test_rows_of_another_shape_are_sent_one_by_one(last: Any) -> None:
    rows = [*itertools.repeat((1, 2), packed_rows.LEAST_ROWS), last]
    assert values.encode(rows, refuse)[0] == "l"
    assert through(rows) == rows


def test_rows_over_many_objects_are_sent_one_by_one() -> None:
    rows = [(number, str(number)) for number in range(packed_rows.LEAST_ROWS)]
    assert values.encode(rows, refuse)[0] == "l"
    assert through(rows) == rows


def packed(items: bytes, **changed: Any) -> list[Any]:
    parts = {"outer": "l", "inner": "t", "width": 2, "objects": [5, 6], "bytes": zlib.compress(items).hex()} | changed
    return ["p", *parts.values()]


@pytest.mark.parametrize(
    "form",
    [
        packed(b"\0\1\2"), packed(b"\0\1\0"), packed(b"\0\1", width=0), packed(b"\0\1", width="2"),
        packed(b"", outer="d"), packed(b"\0\1", inner="x"), packed(b"\0\1", objects=[["l"], 6]),
        packed(b"\0\1", bytes="00"), ["p"], ["p", "l"],
    ],
)  # fmt: skip
def test_wrong_packed_rows_are_rejected(form: list[Any]) -> None:
    with pytest.raises((ValueError, KeyError, IndexError, TypeError, zlib.error)):
        values.decode(form, refuse)


def test_packed_rows_cannot_claim_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "MOST_ITEMS", 1000)
    assert len(values.decode(packed(bytes(1000)), refuse)) == 500
    with pytest.raises(ValueError, match="not packed rows"):
        values.decode(packed(bytes(1002)), refuse)
