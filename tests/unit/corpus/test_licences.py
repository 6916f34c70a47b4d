from __future__ import annotations

import pytest

from lakh.corpus.licences.expressions import classify_expression
from lakh.corpus.licences.metadata import classify_metadata


@pytest.mark.parametrize(
    ("expression", "permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("Apache-2.0 AND GPL-3.0-only", False),
        ("MIT AND (GPL-2.0-only OR BSD-3-Clause)", True),
        ("(MIT OR Apache-2.0) AND MPL-2.0", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-or-later WITH GCC-exception-3.1", False),
        ("LicenseRef-Proprietary", False),
        ("MIT AND", False),
        ("(MIT", False),
        ("MIT Apache-2.0", False),
        ("((((", False),
        ("()", False),
        ("MIT OR", False),
        ("(MIT OR) AND BSD-3-Clause", False),
        ("MIT WITH OR", False),
        ("MIT OR company/licence", True),
        ("MIT/0", False),  # not MIT-0
    ],
)
def test_spdx_expression_is_permissive_if_a_choice_is(expression: str, permissive: bool) -> None:
    assert classify_expression(expression).permissive is permissive


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("MIT License", "MIT"),
        ("BSD 3-Clause", "BSD-3-Clause"),
        ("Apache Software License 2.0", "Apache-2.0"),
        ("ISC", "ISC"),
    ],
)
def test_free_text_licences_are_recognised(text: str, licence: str) -> None:
    assert classify_metadata(text=text) == classify_metadata(text=text)
    assert (classify_metadata(text=text).permissive, classify_metadata(text=text).licence) == (True, licence)


@pytest.mark.parametrize(
    "text", ["GPLv3", "GNU LGPL", "MPL 2.0", "Proprietary", "NVIDIA Proprietary Software", "MIT and GPL", "LGPL/MIT"]
)
def test_copyleft_and_proprietary_words_are_refused_in_any_context(text: str) -> None:
    decision = classify_metadata(text=text, classifiers=["License :: OSI Approved :: MIT License"])
    assert not decision.permissive


def test_pasted_licence_text_is_recognised() -> None:
    text = "Copyright (c) someone\n\nPermission is hereby granted, free of charge, to any person obtaining a copy " * 3
    assert classify_metadata(text=text).licence == "MIT"
    assert not classify_metadata(text="GNU GENERAL PUBLIC LICENSE Version 3 " * 10).permissive


def test_classifiers_decide_if_the_text_does_not() -> None:
    bsd, apache = "License :: OSI Approved :: BSD License", "License :: OSI Approved :: Apache Software License"
    assert classify_metadata(text="Dual License", classifiers=[bsd, apache]).permissive
    mozilla = "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"
    assert not classify_metadata(classifiers=[bsd, mozilla]).permissive
    assert not classify_metadata(classifiers=["Programming Language :: Python"]).permissive


def test_missing_licence_is_not_permissive_and_has_a_reason() -> None:
    decision = classify_metadata()
    assert not decision.permissive
    assert "no licence" in decision.reason
