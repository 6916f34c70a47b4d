"""Shared libraries built from native/: found beside the sources or where they were installed, and checked."""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path

import pytest

from lakh.c3 import native
from lakh.errors import UserError
from lakh.native_library import open_native_library

C3 = "c3/liblakh_c3.so"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.delenv("LAKH_C3_LIBRARY", raising=False)
    library = open_native_library(C3, native.ABI, variable="LAKH_C3_LIBRARY")
    if library is None:
        pytest.skip("the native core is not built: apt-get install g++")
    return library


def test_a_library_that_was_not_built_is_none() -> None:
    assert open_native_library("c3/liblakh_none.so", 1, variable="LAKH_C3_LIBRARY") is None


def test_without_an_installed_lakh_only_the_sources_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", find_nothing)
    assert open_native_library("c3/liblakh_none.so", 1, variable="LAKH_C3_LIBRARY") is None


def test_another_abi_is_refused(built: ctypes.CDLL) -> None:
    with pytest.raises(UserError, match=f"has ABI {native.ABI}, and this lakh needs {native.ABI + 1}"):
        open_native_library(C3, native.ABI + 1, variable="LAKH_C3_LIBRARY")


def test_the_variable_selects_a_file(built: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKH_C3_LIBRARY", built._name)
    with pytest.raises(UserError, match="has no function lakh_other_abi"):
        open_native_library("c3/liblakh_other.so", 1, variable="LAKH_C3_LIBRARY")
    damaged = tmp_path / "damaged.so"
    damaged.write_text("not a library")
    monkeypatch.setenv("LAKH_C3_LIBRARY", str(damaged))
    with pytest.raises(UserError, match="cannot be loaded"):
        open_native_library(C3, native.ABI, variable="LAKH_C3_LIBRARY")
    monkeypatch.setenv("LAKH_C3_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UserError, match="no such file"):
        open_native_library(C3, native.ABI, variable="LAKH_C3_LIBRARY")
