from __future__ import annotations

import pytest

from lakh.corpus.parsing.languages import identify, is_test, is_vendored, language_of

CASES = [
    ("a.py", b"", "python"),
    ("A.PY", b"", "python"),
    ("x.rs", b"", "rust"),
    ("a.h", b"int f(void);\n", "c"),
    ("a.h", b"namespace x {\nclass A;\n}\n", "cpp"),
    ("a.h", b"#include <vector>\n", "cpp"),
    ("a.h", b"@interface Foo\n@end\n", ""),
    ("a.m", b"#import <Foundation/Foundation.h>\n", ""),
    ("a.m", b"function y = f(x)\n", "matlab"),
    ("de.ts", b'<?xml version="1.0"?><TS>', ""),
    ("a.ts", b"export const x = 1\n", "typescript"),
    ("run", b"#!/usr/bin/env python3\n", "python"),
    ("run", b"#!/bin/sh\n", "bash"),
    ("run", b"hello", ""),
    ("a.pl", b":- module(x, []).\n", ""),
    ("a.pl", b"use strict;\nmy $x = 1;\n", "perl"),
    ("CMakeLists.txt", b"", "cmake"),
    ("photo.png", b"", ""),
]


@pytest.mark.parametrize(("path", "head", "language"), CASES)
def test_language_is_detected_by_name_and_for_shared_names_by_content(path: str, head: bytes, language: str) -> None:
    found = identify(path, head)
    assert found.language == language
    assert found.reason


def test_name_alone_is_enough_for_most_files() -> None:
    assert language_of("src/deep/main.go") == "go"
    assert language_of("Makefile") == ""


@pytest.mark.parametrize(
    "path", ["tests/x.py", "a/test_b.py", "a/b_test.go", "x.spec.ts", "src/__tests__/a.js", "FooTest.java"]
)
def test_test_files_are_detected_by_path(path: str) -> None:
    assert is_test(path)


@pytest.mark.parametrize("path", ["src/contest.py", "latest/x.py", "a/testify.go", "attest.c"])
def test_similar_names_are_not_test_files(path: str) -> None:
    assert not is_test(path)


def test_vendored_code_is_detected_by_folder() -> None:
    assert is_vendored("node_modules/x/a.js")
    assert is_vendored("src/third_party/a.c")
    assert not is_vendored("src/vendor.py")
