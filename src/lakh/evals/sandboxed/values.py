"""Plain data as JSON and back, with types kept: the values that candidate and examiner exchange.

Decoding never runs code: no pickle, no marshal. A value is a JSON scalar, or a list whose first item is a tag:

    ["l", ...] list      ["t", ...] tuple     ["s", ...] set       ["f", ...] frozenset   ["d", k, v, k, v ...] dict
    ["b", hex] bytes     ["i", hex] long int  ["c", re, im]        ["a", hex] bytearray   ["r", start, stop, step] range
    ["x", name, ...] a value of a known library type               ["y", name] a built-in type
    ["p", ...] many rows over a few objects (packed_rows.py)
    ["n", dtype, shape, ...] an array of numpy, if it is loaded here; without a shape, a scalar of numpy
    ["h", number] a handle: an object that stays in the candidate's process

A subclass of a plain type is sent as that type, by the plain type's own methods, so an overridden __eq__ has no effect.
Raises ValueError for what is not of this form, TypeError for what cannot be sent.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from lakh.evals.sandboxed import packed_rows

LONG_INT = 10**4000  # above this many digits, Python refuses to parse a number

_DTYPE = re.compile(r"[<>|=]?[biufcSUO]\d{0,4}")
_SCALARS = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}

# library types: name -> (module, to plain parts, from the type and its plain parts). Modules are imported when such a
# value arrives: what is not in memory need not be copied for every program.
_LIBRARY: dict[str, tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "Counter": ("collections", lambda v: [dict(v)], lambda kind, d: kind(d)),
    "OrderedDict": ("collections", lambda v: [dict(v)], lambda kind, d: kind(d)),
    "defaultdict": ("collections", lambda v: [dict(v)], lambda kind, d: kind(None, d)),
    "deque": ("collections", lambda v: [list(v), v.maxlen], lambda kind, items, maxlen: kind(items, maxlen)),
    "Decimal": ("decimal", lambda v: [str(v)], lambda kind, text: kind(text)),
    "Fraction": ("fractions", lambda v: [v.numerator, v.denominator], lambda kind, a, b: kind(a, b)),
    "datetime": ("datetime", lambda v: [v.isoformat()], lambda kind, text: kind.fromisoformat(text)),
    "date": ("datetime", lambda v: [v.isoformat()], lambda kind, text: kind.fromisoformat(text)),
    "time": ("datetime", lambda v: [v.isoformat()], lambda kind, text: kind.fromisoformat(text)),
    "timedelta": ("datetime", lambda v: [v.days, v.seconds, v.microseconds], lambda kind, d, s, m: kind(d, s, m)),
}


def _library_name(kind: type) -> str:
    """The name of a known library type; empty for any other type, whatever its name."""
    name = kind.__name__
    if name in _LIBRARY and getattr(sys.modules.get(_LIBRARY[name][0]), name, None) is kind:
        return name
    return ""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """The JSON form of a value; `keep` gives the form of an object that is not plain data."""
    kind = type(value)
    if kind is int:
        return value if -LONG_INT < value < LONG_INT else ["i", hex(value)]
    if kind in _SCALARS:
        return value
    if kind is list or kind is tuple:
        if len(value) >= packed_rows.LEAST_ROWS and (packed := packed_rows.pack(value)) is not None:
            return packed
        tag = "l" if kind is list else "t"
        return [tag, *[item if type(item) in (str, float, bool) else encode(item, keep) for item in value]]
    if kind is dict:
        return ["d", *[encode(part, keep) for pair in value.items() for part in pair]]
    if kind is set or kind is frozenset:
        return ["s" if kind is set else "f", *[encode(item, keep) for item in value]]
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "a", value.hex()]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range:
        return ["r", value.start, value.stop, value.step]
    if known := _library_name(kind):
        return ["x", known, *[encode(part, keep) for part in _LIBRARY[known][1](value)]]
    name = getattr(value, "__name__", "") if kind is type else ""
    if name and vars(builtins).get(name) is value:
        return ["y", name]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and _DTYPE.fullmatch(value.dtype.str):
        shape = list(value.shape) if isinstance(value, numpy.ndarray) else None
        items = value.ravel().tolist() if shape is not None else [value.item()]
        return ["n", value.dtype.str, shape, *[encode(item, keep) for item in items]]
    return _encode_subclass(value, keep)


def _encode_subclass(value: Any, keep: Callable[[Any], Any]) -> Any:
    plain: Any
    for plain in (bool, int, float, str, bytes):
        if isinstance(value, plain) and plain in type(value).__mro__:
            copy = plain.__str__(value) if plain is str else plain.__new__(plain, value)
            return encode(copy, keep) if type(copy) is plain else keep(value)
    for base, items in ((list, list.__iter__), (tuple, tuple.__iter__), (set, set.__iter__)):
        if base in type(value).__mro__:
            return encode(base(items(value)), keep)
    if dict in type(value).__mro__:
        return encode(dict(dict.items(value)), keep)
    return keep(value)


def decode(form: Any, find: Callable[[int], Any]) -> Any:
    """The value of a JSON form; `find` gives the object of a handle."""
    if not isinstance(form, list):
        if isinstance(form, dict):
            raise ValueError("not a value")
        return form
    if not form:
        raise ValueError("not a value")
    tag, parts = form[0], form[1:]
    if tag in ("l", "t", "s", "f"):
        return _SEQUENCES[tag]([part if type(part) is not list else decode(part, find) for part in parts])
    if tag == "d":
        plain = [decode(part, find) for part in parts]
        return dict(zip(plain[::2], plain[1::2], strict=True))
    if tag in ("b", "a"):
        return bytes.fromhex(*parts) if tag == "b" else bytearray.fromhex(*parts)
    if tag == "i":
        return int(parts[0], 16)
    if tag == "c":
        return complex(float(parts[0]), float(parts[1]))
    if tag == "r":
        return range(*(int(part) for part in parts))
    if tag == "h":
        return find(int(parts[0]))
    if tag == "y" and isinstance(vars(builtins).get(parts[0]), type):
        return vars(builtins)[parts[0]]
    if tag == "x" and parts and parts[0] in _LIBRARY:
        module, _, make = _LIBRARY[parts[0]]
        return make(getattr(importlib.import_module(module), parts[0]), *[decode(part, find) for part in parts[1:]])
    if tag == "p":
        return packed_rows.unpack(*parts)
    if tag == "n":
        return _decode_numpy(parts[0], parts[1], [decode(part, find) for part in parts[2:]])
    raise ValueError(f"unknown tag {tag!r}")


def _decode_numpy(dtype: str, shape: list[int] | None, items: list[Any]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not _DTYPE.fullmatch(dtype):
        raise ValueError("not a value of numpy")
    if shape is None:
        return numpy.dtype(dtype).type(*items)
    flat = numpy.empty(len(items), dtype)
    flat[:] = items
    return flat.reshape(shape)


def holds_mutable(values: Any) -> bool:
    """Whether a called function could change one of these in place."""
    return any(isinstance(value, list | dict | set | bytearray | deque) for value in values)
