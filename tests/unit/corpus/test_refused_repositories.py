# ruff: noqa: E501 - cases of one line each
"""Repositories that are not permissive, in the forms in which real ones say so, and permissive ones beside them."""

from __future__ import annotations

import json

import pytest

from lakh.corpus.filters.licence import class_of
from lakh.corpus.licences.detect import RESTRICTION, header_licence, repository_licence
from lakh.corpus.sources.licence_evidence import LicenceEvidence, is_licence_evidence

MIT = """MIT License

Copyright (c) 2020 Ann Example

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
GPL_NOTICE = """This program is free software; you can redistribute it and/or modify it under the terms of the GNU General
Public License as published by the Free Software Foundation; either version 2 of the License, or (at your option) any later
version. This program is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY.
"""
LGPL_NOTICE = GPL_NOTICE.replace("GNU General\nPublic", "GNU Lesser General\nPublic").replace(
    "version 2", "version 2.1"
)
CLOSED = "Copyright (c) 2021 Acme Corp. All rights reserved. This software is confidential and proprietary.\n"


def edited(old: str, new: str) -> str:
    assert old in MIT
    return MIT.replace(old, new)


def package(**fields: object) -> str:
    return json.dumps({"name": "thing", "version": "1.0.0", **fields})


def pom(name: str) -> str:
    return f"<project><licenses>\n  <license>\n    <name>{name}</name>\n  </license>\n</licenses></project>\n"


NOT_PERMISSIVE: dict[str, dict[str, str]] = {
    # package metadata
    "npm, UNLICENSED": {"package.json": package(license="UNLICENSED")},
    "npm, unlicensed in small letters": {"package.json": package(license="Unlicensed")},
    "npm, private": {"package.json": package(license="SEE LICENSE IN EULA.txt", private=True)},
    "npm, GPL-3.0": {"package.json": package(license="GPL-3.0")},
    "npm, old object": {"package.json": package(license={"type": "AGPL-3.0-only", "url": "https://acme.io"})},
    "npm, CC-BY-NC": {"package.json": package(license="CC-BY-NC-4.0")},
    "npm, BUSL": {"package.json": package(license="BUSL-1.1")},
    "npm, Elastic": {"package.json": package(license="Elastic-2.0")},
    "npm, MIT AND GPL": {"package.json": package(license="MIT AND GPL-2.0-only")},
    "composer, GPL": {"composer.json": package(license="GPL-2.0-or-later")},
    "composer, list of two": {"composer.json": package(license=["LGPL-2.1-only", "GPL-3.0-or-later"])},
    "composer, proprietary": {"composer.json": package(license="proprietary")},
    "setup.py, argument": {"setup.py": "setup(name='x', license='GPLv3')\n"},
    "setup.py, classifier": {
        "setup.py": "setup(classifiers=['License :: OSI Approved :: GNU General Public License v2 (GPLv2)'])\n"
    },
    "setup.py, LGPL": {"setup.py": 'setup(\n    name="x",\n    license="LGPL-3.0-or-later",\n)\n'},
    "setup.cfg, AGPL": {"setup.cfg": "[metadata]\nlicense = AGPL-3.0\n"},
    "pyproject, proprietary": {"pyproject.toml": '[project]\nname = "x"\nlicense = {text = "Proprietary"}\n'},
    "pyproject, GPL": {"pyproject.toml": '[project]\nname = "x"\nlicense = "GPL-3.0-or-later"\n'},
    "Cargo, GPL": {"Cargo.toml": '[package]\nname = "x"\nlicense = "GPL-3.0"\n'},
    "Cargo, MPL": {"Cargo.toml": '[package]\nname = "x"\nlicense = "MPL-2.0"\n'},
    "gemspec, GPL": {
        "thing.gemspec": "Gem::Specification.new do |s|\n  s.name = 'thing'\n  s.license = 'GPL-3.0'\nend\n"
    },
    "gemspec, list": {"thing.gemspec": "Gem::Specification.new do |s|\n  s.licenses = ['LGPL-2.1']\nend\n"},
    "Maven, GPL": {"pom.xml": pom("GNU General Public License, Version 3")},
    "Maven, EPL": {"pom.xml": pom("Eclipse Public License 1.0")},
    "Maven, closed": {"pom.xml": pom("Commercial License")},
    "R, GPL": {"DESCRIPTION": "Package: thing\nVersion: 1.0\nLicense: GPL (>= 2)\n"},
    # licence files in other places and forms
    "license.html": {"license.html": f"<html><body><p>{GPL_NOTICE}</p></body></html>"},
    "gpl.txt": {"gpl.txt": GPL_NOTICE},
    "lgpl-2.1.txt": {"lgpl-2.1.txt": LGPL_NOTICE},
    "docs/COPYING": {"docs/COPYING": GPL_NOTICE},
    "src/COPYING": {"src/COPYING": GPL_NOTICE},
    "src/COPYING beside MIT": {"LICENSE": MIT, "src/COPYING": GPL_NOTICE},
    "MIT and a GPL text": {"LICENSE.MIT": MIT, "COPYING": GPL_NOTICE},
    "closed": {"LICENSE": CLOSED},
    "empty": {"LICENSE": ""},
    "one line": {"LICENSE": "No license. You may look at the code.\n"},
    # permissive texts that were changed
    "MIT, research": {"LICENSE": edited("without restriction", "solely for non-commercial research")},
    "MIT, non-commercial": {
        "LICENSE": edited("subject to the following", "for non-commercial purposes, subject to the following")
    },
    "MIT, no sale": {"LICENSE": MIT + "\nYou may not sell the Software or any derivative of it.\n"},
    "MIT, Commons Clause": {"LICENSE": '"Commons Clause" License Condition v1.0\n\n' + MIT},
    "MIT, academic": {"LICENSE": edited("to any person", "only for academic use to any person")},
    "MIT, evaluation": {"LICENSE": edited("to use, copy", "for evaluation purposes to use, copy")},
    "MIT, no AI": {"LICENSE": MIT + "\nThe Software must not be used for training of machine learning models.\n"},
    "MIT, military": {"LICENSE": MIT + "\nNo military use.\n"},
    # README only
    "README, heading": {"README.md": "# Thing\n\n## License\n\nGPLv3, see the web site.\n"},
    "README, sentence": {"README.md": "# Thing\n\nThing is free software, licensed under the GNU GPL v2.\n"},
    "README, long name": {"README": "Thing\n\nThis is distributed under the GNU General Public License.\n"},
    "README, AGPL": {"README.rst": "Thing\n=====\n\nReleased under AGPLv3.\n"},
    "README, non-commercial": {
        "README.md": "# Thing\n\n## License\n\nFree for non-commercial use. Contact us for a licence.\n"
    },
    "README, all rights reserved": {"README.md": "# Thing\n\n## License\n\nAll rights reserved.\n"},
}

PERMISSIVE: dict[str, dict[str, str]] = {
    "LICENSE": {"LICENSE": MIT},
    "LICENSE.md": {"LICENSE.md": "# " + MIT},
    "docs/LICENSE": {"docs/LICENSE": MIT},
    "license.html": {"license.html": f"<html><body><pre>{MIT}</pre></body></html>"},
    "npm": {"package.json": package(license="MIT")},
    "npm, two": {"package.json": package(license="(MIT OR Apache-2.0)")},
    "npm, Unlicense": {"package.json": package(license="Unlicense")},
    "npm, OR GPL": {"package.json": package(license="(MIT OR GPL-3.0-only)")},
    "composer": {"composer.json": package(license="BSD-3-Clause")},
    "composer, list": {"composer.json": package(license=["MIT", "GPL-3.0-or-later"])},
    "setup.py": {"setup.py": "setup(name='x', license='Apache 2.0')\n"},
    "setup.py, classifier": {"setup.py": "setup(classifiers=['License :: OSI Approved :: MIT License'])\n"},
    "setup.cfg": {"setup.cfg": "[metadata]\nlicense = BSD\n"},
    "pyproject": {"pyproject.toml": '[project]\nname = "x"\nlicense = "MIT"\n'},
    "Cargo": {"Cargo.toml": '[package]\nname = "x"\nlicense = "MIT/Apache-2.0"\n'},
    "gemspec": {"thing.gemspec": "Gem::Specification.new do |s|\n  s.license = 'MIT'\nend\n"},
    "Maven": {"pom.xml": pom("The Apache License, Version 2.0")},
    "README": {"README.md": "# Thing\n\n## License\n\nMIT\n"},
    "README, sentence": {"README.md": "# Thing\n\n## License\n\nThis project is licensed under the MIT License.\n"},
    "LICENSE and README": {"LICENSE": MIT, "README.md": "# Thing\n\nWorks with GPL programs too.\n"},
}


def class_of_repository(files: dict[str, str]) -> str:
    evidence = LicenceEvidence()
    for path, text in files.items():
        assert is_licence_evidence(path), path
        evidence.add(path, text.encode())
    return class_of(evidence.classify().expression)


def test_fifty_cases() -> None:
    assert len(NOT_PERMISSIVE) >= 50


@pytest.mark.parametrize("name", NOT_PERMISSIVE)
def test_repository_that_is_not_permissive_is_refused_with_a_reason(name: str) -> None:
    assert class_of_repository(NOT_PERMISSIVE[name]) in ("copyleft", "unknown")


def test_at_most_one_permissive_repository_in_twenty_is_refused() -> None:
    refused = [name for name, files in PERMISSIVE.items() if class_of_repository(files) != "permissive"]
    assert len(refused) <= len(PERMISSIVE) // 20, refused


@pytest.mark.parametrize(
    "line", ["GPLv2", "Released under the GPL v3", "License: LGPLv2.1+", "This file is under the GNU GPL"]
)
def test_short_notices_in_headers_are_read(line: str) -> None:
    assert class_of(header_licence(f"/* license: {line}\n */\nint x;\n".encode()).expression) == "copyleft"


def test_unlicense_speaks_of_non_commercial_use_and_is_permissive() -> None:
    assert RESTRICTION.search("for any purpose, commercial or non-commercial, and by any means") is None
    assert RESTRICTION.search("for non-commercial use") is not None


def test_header_of_a_permissive_file_that_mentions_the_gpl_in_code_stays() -> None:
    head = b'# SPDX-License-Identifier: MIT\nNAMES = {"gpl": "GPL-2.0"}\n'
    assert header_licence(head).expression == "MIT"
    assert repository_licence({"LICENSE": MIT.encode()}).expression == "MIT"
