"""Settings: frozen dataclasses, filled strictly from TOML and from `--set path=value`.

A component describes its settings as a frozen dataclass with defaults; the string below a field is its
documentation, which is written as a comment into every settings file. An unknown key, a wrong type, or a value that
the class rejects in `__post_init__` (by raising ConfigError with the field name) raises ConfigError with the full path
of the setting and its origin.

Supported types: bool, int, float, str, Literal, tuple[T, ...], dict[str, T], other dataclasses, and `T | None` (None is
written by omitting the key).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from lakh.errors import ConfigError, InfeasiblePlan

__all__ = [
    "Change",
    "Setting",
    "diff",
    "fingerprint",
    "from_dict",
    "leaves",
    "load",
    "read_toml",
    "require",
    "require_not_negative",
    "require_positive",
    "settings",
    "to_dict",
    "to_toml",
    "with_sets",
]

T = TypeVar("T")
Change = tuple[str, Any, Any]
"""(path, before, after) of a setting."""
_UNIONS = (typing.Union, types.UnionType)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of a settings class, for documentation and comparison."""

    path: str
    type: str
    default: Any
    doc: str


def load(cls: type[T], path: str | Path, sets: Sequence[str] = ()) -> T:
    """Read a TOML file into `cls`, then apply `--set` values."""
    return from_dict(cls, _merge_sets(cls, read_toml(path), sets), origin=Path(path).name, sets=sets)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError says why it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})", "check the file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"is not TOML ({error})", "fix that line") from None


def with_sets(config: T, sets: Sequence[str], origin: str = "recipe") -> T:
    """A copy of `config` with `--set path=value` applied in order; later ones win."""
    if not sets:
        return config
    cls = type(config)
    return from_dict(cls, _merge_sets(cls, to_dict(config), sets), origin=origin, sets=sets)


def from_dict(cls: type[T], data: Mapping[str, Any], *, origin: str, sets: Sequence[str] = ()) -> T:
    """Build `cls` from plain data; unknown keys are errors."""
    from_sets = frozenset(item.partition("=")[0].strip() for item in sets)
    return typing.cast(T, _build(cls, data, "", _Origin(origin, from_sets)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data, with keys in declaration order and without None."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            result[field.name] = _plain(value)
    return result


def to_toml(config: Any, *, comments: bool = True) -> str:
    """The complete settings as TOML, by default with their documentation as comments."""
    return "\n".join(_toml_lines(config, path="", comments=comments)).strip() + "\n"


def fingerprint(config: Any) -> str:
    """SHA-256 of the settings, independent of the order and comments of their file."""
    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff(left: Any, right: Any) -> list[Change]:
    """(path, left, right) of every leaf that differs; None for a missing side."""
    a, b = dict(leaves(left)), dict(leaves(right))
    paths = list(a) + [path for path in b if path not in a]
    return [(path, a.get(path), b.get(path)) for path in paths if a.get(path) != b.get(path)]


def leaves(config: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of every setting that is not None."""
    return _leaves(to_dict(config))


def settings(cls: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Every leaf setting of `cls` with its type, default and documentation."""
    hints = _type_hints(cls)
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        tables = [part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)]
        if tables and typing.get_origin(hint) in (None, *_UNIONS):  # a table, or an optional one
            yield from settings(typing.cast(type[Any], tables[0]), f"{path}.")
            continue
        default: Any = "required"
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = _plain(field.default_factory())
        yield Setting(path, _type_name(hint), default, docs.get(field.name, ""))


def require_positive(config: Any, *names: str) -> None:
    """For `__post_init__`: reject whole-number fields below 1."""
    require(config, names, lambda value: value >= 1, "is not positive", "choose 1 or more")


def require_not_negative(config: Any, *names: str) -> None:
    """For `__post_init__`: reject fields below 0."""
    require(config, names, lambda value: value >= 0, "is negative", "use 0 or more")


def require(
    config: Any, names: str | Sequence[str], is_valid: Callable[[Any], bool], found: str, todo: str = "change the value"
) -> None:
    """For `__post_init__`: reject a field whose value is not None and not valid: "NAME: VALUE FOUND; TODO"."""
    for name in [names] if isinstance(names, str) else names:
        value = getattr(config, name)
        if value is not None and not is_valid(value):
            raise ConfigError(name, f"{value} {found}", todo)


# --- reading -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where values come from, for error messages."""

    file: str
    from_sets: frozenset[str]
    """Paths that `--set` has given."""

    def where(self, path: str) -> str:
        path = path.rstrip(".")
        is_set = any(path == item or path.startswith(f"{item}.") for item in self.from_sets)
        return f"{path} ({'from --set' if is_set else self.file})" if path else self.file


_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Of a class; the first call compiles every annotation."""


def _build(cls: type[Any], data: Any, path: str, origin: _Origin) -> Any:
    hints = _type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(data, Mapping):
        raise ConfigError(origin.where(path), f"{data!r} is not a table", "write it as [section]")
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            todo = f"did you mean {path}{near[0]}?" if near else f"known here: {', '.join(names)}"
            raise ConfigError(origin.where(f"{path}{key}"), "no such setting", todo)
    values = {}
    for field in dataclasses.fields(cls):
        full = f"{path}{field.name}"
        if field.name in data:
            values[field.name] = _convert(hints[field.name], data[field.name], full, origin)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            todo = f"give it a value of type {_type_name(hints[field.name])}"
            raise ConfigError(origin.where(full), "is missing", todo)
    try:
        return cls(**values)
    except (ConfigError, InfeasiblePlan) as error:
        raise type(error)(origin.where(f"{path}{error.where}"), error.found, error.todo) from None


def _convert(hint: Any, value: Any, path: str, origin: _Origin) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, f"{path}.", origin)
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    wrong = ConfigError(origin.where(path), f"{value!r} is not {_type_name(hint)}", "change the value")
    if kind is Literal:
        if value in args:
            return value
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        todo = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError(wrong.where, wrong.found, todo)
    if kind in _UNIONS:
        options = [arg for arg in args if arg is not type(None)]
        return _convert(options[0], value, path, origin)
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise wrong
        if len(args) == 2 and args[1] is ...:
            inner = [args[0]] * len(value)
        elif len(args) == len(value):
            inner = list(args)
        else:
            raise wrong
        pairs = zip(inner, value, strict=True)
        return tuple(_convert(t, v, f"{path}[{i}]", origin) for i, (t, v) in enumerate(pairs))
    if kind is dict:
        if not isinstance(value, Mapping):
            raise wrong
        return {str(k): _convert(args[1], v, f"{path}.{k}", origin) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # people write a billion as 1e9
    if hint in (bool, int, float, str) and type(value) is hint:
        return value
    raise wrong


def _merge_sets(cls: type[Any], data: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = json.loads(json.dumps(data, default=str))  # a deep copy of plain data
    for item in sets:
        path, sign, text = item.partition("=")
        keys = path.strip().split(".")
        if not sign or not all(keys):
            raise ConfigError(f"--set {item}", "is not of the form path=value", "write e.g. --set optim.lr=1e-3")
        table = merged
        for depth, key in enumerate(keys[:-1]):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                found = f"{'.'.join(keys[: depth + 1])} is a value"
                raise ConfigError(f"--set {item}", found, "set it as a whole")
        table[keys[-1]] = text.strip() if _hint_at(cls, keys) is str else _parse_value(text.strip())
    return merged


def _hint_at(cls: Any, keys: Sequence[str]) -> Any:
    hint = cls
    for key in keys:
        if not dataclasses.is_dataclass(hint):
            return None
        hint = _type_hints(hint).get(key)
    return hint


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # an unquoted string, e.g. --set train.precision=bf16


def _type_name(hint: Any) -> str:
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if kind in _UNIONS:
        return " or ".join(_type_name(arg) for arg in args if arg is not type(None))
    if kind is tuple:
        return f"a list of {_type_name(args[0])}"
    if kind is dict:
        return f"a table of {_type_name(args[1])}"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


# --- writing -----------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml_lines(config: Any, path: str, comments: bool) -> Iterator[str]:
    docs = _field_docs(type(config)) if comments else {}
    tables: list[tuple[str, Any]] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            continue
        is_table = dataclasses.is_dataclass(value) or isinstance(value, Mapping)
        is_tables = isinstance(value, tuple) and bool(value) and dataclasses.is_dataclass(value[0])
        if is_table or is_tables:
            tables.append((field.name, value))
            continue
        if docs.get(field.name):
            yield from _comment(docs[field.name])
        yield f"{_toml_key(field.name)} = {_toml_value(value)}"
    for name, value in tables:
        full = f"{path}{_toml_key(name)}"
        if isinstance(value, Mapping):
            yield from ("", f"[{full}]")
            yield from (f"{_toml_key(key)} = {_toml_value(_plain(item))}" for key, item in value.items())
        elif isinstance(value, tuple):
            for item in value:
                yield from ("", f"[[{full}]]")
                yield from _toml_lines(item, f"{full}.", comments)
        else:
            yield from ("", f"[{full}]")
            yield from _toml_lines(value, f"{full}.", comments)


@functools.cache
def _comment(doc: str) -> tuple[str, ...]:
    return tuple(f"# {line}" for line in textwrap.wrap(doc, 110))


def _toml_key(key: str) -> str:
    bare = key.replace("-", "a").replace("_", "a").isalnum() and key.isascii()
    return key if bare else _toml_text(key)


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, float | int):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The string literals below the fields of a dataclass; {} if the source is not available."""
    try:
        return _docs_in_file(inspect.getfile(cls)).get(cls.__qualname__, {})
    except (OSError, TypeError, SyntaxError):
        return {}


@functools.cache
def _docs_in_file(path: str) -> dict[str, dict[str, str]]:
    """Of all classes in a file, by qualified name. Parsed once: every checkpoint of a run writes its settings."""
    return dict(_docs_in(ast.parse(Path(path).read_bytes()).body, ""))


def _docs_in(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for statement in body:
        match statement:
            case ast.ClassDef(name=name, body=inner):
                yield f"{prefix}{name}", dict(_documented(inner))
                yield from _docs_in(inner, f"{prefix}{name}.")
            case ast.FunctionDef(name=name, body=inner):
                yield from _docs_in(inner, f"{prefix}{name}.<locals>.")


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                yield name, " ".join(doc.split())
