from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.document import complete
from lakh.corpus.filters.licence import LicenceSettings, class_of, licence_filter
from lakh.corpus.filters.opt_out import opt_out_filter, read_opt_out
from lakh.corpus.licences.detect import UNKNOWN, header_licence, is_licence_file, repository_licence
from lakh.corpus.licences.spdx_texts import identify_text, word_pairs
from lakh.errors import ConfigError, UserError

ROOT = Path(__file__).parents[3]
APACHE = (ROOT / "LICENSE").read_bytes()  # lakh's own
BSD = b"""Copyright (c) %s
All rights reserved.

Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met:
1. Redistributions of source code must retain the above copyright notice, this list of conditions and the following
disclaimer.
2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
disclaimer in the documentation and/or other materials provided with the distribution.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF
THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
"""


def test_licence_text_is_recognised_with_any_holder_and_layout() -> None:
    assert identify_text(APACHE).licence == "Apache-2.0"
    assert identify_text(BSD % b"1999-2024 Jane Doe and others").licence == "BSD-2-Clause"
    assert identify_text((BSD % b"2020, ACME").replace(b"\n", b"\r\n").upper()).licence == "BSD-2-Clause"
    assert identify_text(b"# " + (BSD % b"2020").replace(b"\n", b"\n# ")).licence == "BSD-2-Clause"


def test_modified_licence_is_another_licence() -> None:
    text = (
        BSD % b"2024 ACME" + b"3. You may not use this software for evil, nor in a country that begins with an A. " * 3
    )
    match = identify_text(text)
    assert (match.licence, match.nearest) == ("", "BSD-2-Clause")
    found = repository_licence({"LICENSE": text})
    assert found.expression == UNKNOWN
    assert "modified" in found.evidence


@given(st.binary(max_size=400))
def test_licence_detection_accepts_any_bytes(data: bytes) -> None:
    assert identify_text(data).similarity <= 1
    assert len(word_pairs(data)) <= len(data)
    header_licence(data)
    repository_licence({"LICENSE": data, "package.json": data, "README": data, "Cargo.toml": data})


def test_huge_licence_file_is_handled_in_time() -> None:
    begin = time.process_time()
    repository_licence({"LICENSE": b"lorem ipsum " * 2_000_000})
    assert time.process_time() - begin < 60


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("LICENSE", True),
        ("LICENCE.md", True),
        ("COPYING.LESSER", True),
        ("MIT-LICENSE.txt", True),
        ("LICENSES/MIT.txt", True),
        ("PATENTS", True),
        ("license.py", False),
        ("src/LICENSE", True),
        ("README", False),
    ],
)
def test_licence_files_are_detected_by_path(path: str, is_one: bool) -> None:
    assert is_licence_file(path) is is_one


def test_licence_statements_of_a_repository_are_joined() -> None:
    bsd = BSD % b"2024 X"
    assert repository_licence({}).expression == ""
    assert repository_licence({"LICENSE": bsd}).expression == "BSD-2-Clause"
    assert repository_licence({"LICENSE": bsd, "LICENSE-APACHE": APACHE}).expression == "Apache-2.0 AND BSD-2-Clause"
    assert (
        repository_licence({"LICENSE": bsd, "PATENTS": b"we may sue you"}).expression == f"BSD-2-Clause AND {UNKNOWN}"
    )
    assert repository_licence({"package.json": b'{"license": "MIT"}'}).expression == "MIT"
    assert (
        repository_licence({"Cargo.toml": b'[package]\nlicense = "MIT OR Apache-2.0"\n'}).expression
        == "MIT OR Apache-2.0"
    )
    assert repository_licence({"package.json": b"{broken", "LICENSE": bsd}).expression == "BSD-2-Clause"
    assert repository_licence({"README.md": b"# Tool\n\n## License\n\nMIT\n"}).expression == "MIT"


@pytest.mark.parametrize(
    ("head", "expression"),
    [
        (b"// SPDX-License-Identifier: MIT\n", "MIT"),
        (b"/* SPDX-License-Identifier: (GPL-2.0 OR MIT) */\n", "(GPL-2.0-only OR MIT)"),
        (b"# SPDX-License-Identifier: GPL-2.0+\n", "GPL-2.0-or-later"),
        (b" * Licensed under the Apache License, Version 2.0 (the\n * \"License\")", "Apache-2.0"),
        (b"under the terms of the GNU General Public License as published by\n# the FSF, either version 3 of the License,"  # noqa: E501
         b" or\n# (at your option) any later version.", "GPL-3.0-or-later"),
        (b"the terms of the GNU Lesser General Public License version 2.1 as published", "LGPL-2.1-only"),
        (b"This Source Code Form is subject to the terms of the Mozilla Public\n// License, v. 2.0.", "MPL-2.0"),
        (b"import os\nprint('license plate')\n", ""),
        (b'FIND = re.compile(rb"SPDX-License-Identifier:[ \\t]*([^\\n]+)")\n', ""),
        (b"x = 1\n", ""),
    ],
)  # fmt: skip
def test_licence_headers_are_read(head: bytes, expression: str) -> None:
    assert header_licence(head).expression == expression


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("MIT", "permissive"),
        ("GPL-3.0-only OR MIT", "permissive"),
        ("GPL-3.0-only AND MIT", "copyleft"),
        ("LGPL-2.1-or-later", "copyleft"),
        ("", "none"),
        (f"MIT AND {UNKNOWN}", "unknown"),
        ("BUSL-1.1", "unknown"),
    ],
)
def test_every_expression_has_a_class(expression: str, name: str) -> None:
    assert class_of(expression) == name


def batch_of(rows: list[dict[str, str]]) -> pa.RecordBatch:
    names = ("repo", "path", "licence", "text", "sha256")
    return complete(pa.record_batch({name: [row.get(name, "") for row in rows] for name in names}))


def test_licence_filter_drops_with_evidence_and_header_takes_precedence() -> None:
    rows = [
        {"licence": "MIT", "text": "x = 1\n"},
        {"licence": "GPL-3.0-only", "text": "x = 1\n"},
        {"licence": "MIT", "text": "# SPDX-License-Identifier: GPL-2.0-only\nx = 1\n"},
        {"licence": "LicenseRef-own", "text": "x = 1\n"},
        {"licence": "", "text": "x = 1\n"},
        {"licence": "LicenseRef-unknown", "text": "x = 1\n"},
    ]
    made = licence_filter(LicenceSettings())(batch_of(rows)).to_pylist()
    assert [row["reason"] for row in made] == ["", "licence", "licence", "", "licence", "licence"]
    assert made[2]["detail"] == "GPL-2.0-only is copyleft (SPDX line in the header)"
    strict = licence_filter(LicenceSettings(take=("permissive",), also=("GPL-3.0-only",)))(batch_of(rows))
    assert [row["reason"] for row in strict.to_pylist()] == ["", "", *["licence"] * 4]
    with pytest.raises(ConfigError, match=r"take: 'free'"):
        LicenceSettings(take=("free",))


def test_opt_out_requests_are_honoured_by_owner_repository_path_and_hash(tmp_path: Path) -> None:
    listed = tmp_path / "out.txt"
    listed.write_text("# requests\nowner:Jane\nrepo:ann/tool  # since 2024\npath:bob/lib/src/*.py\nsha256:ABCDEF\n\n")
    rows = [
        {"repo": "jane/x", "path": "a.py"},
        {"repo": "Ann/Tool", "path": "a.py"},
        {"repo": "ann/other", "path": "a.py"},
        {"repo": "bob/lib", "path": "src/deep/a.py"},
        {"repo": "bob/lib", "path": "test.py"},
        {"repo": "eve/z", "path": "a.py", "sha256": "abcdef"},
    ]
    made = opt_out_filter(str(listed))(batch_of([{**row, "text": "x"} for row in rows])).to_pylist()
    assert [row["reason"] for row in made] == ["opt-out", "opt-out", "", "opt-out", "", "opt-out"]
    assert made[3]["detail"] == "path:bob/lib/src/*.py"
    assert opt_out_filter("")(batch_of(rows)).column("reason").to_pylist() == [""] * 6


def test_malformed_opt_out_request_is_an_error(tmp_path: Path) -> None:
    listed = tmp_path / "out.txt"
    listed.write_text("repo:ann/tool\nplease remove me\n")
    with pytest.raises(UserError, match=r"out\.txt, line 2: 'please remove me' is not a request"):
        read_opt_out(str(listed))
    with pytest.raises(UserError, match="no such file"):
        read_opt_out(str(tmp_path / "missing.txt"))


def test_labelled_repositories_get_the_licence_of_their_label(shared_data) -> None:
    folder = shared_data("labels/licensee", "repositories with labelled licences (licensee's spec/fixtures)")
    labels, name = {}, ""
    for line in (folder / "fixtures.yml").read_text().splitlines():
        if not line.startswith(" ") and line.endswith(":"):
            name = line.rstrip(":")
        elif line.strip().startswith("key:"):
            labels[name] = line.partition(":")[2].strip()
    wrong = []
    for name, label in labels.items():
        base = folder / "fixtures" / name
        found = repository_licence({str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()})
        family = found.expression.lower().removesuffix("-only").removesuffix("-or-later")
        # "other": a file that is modified, unknown, or disagrees with another; two licences are unknown to the labels
        is_other = UNKNOWN.lower() in family or " and " in family or family in ("cc-by-nd-4.0", "cc-by-nc-sa-4.0")
        if ("other" if is_other else family or "null") != label:
            wrong.append((name, label, found))
    assert len(labels) >= 40
    assert len(wrong) <= 0.05 * len(labels), wrong
