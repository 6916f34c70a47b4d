"""Make the licence profiles that lakh ships, from the JSON files of the npm package spdx-license-list (CC0-1.0).

    python scripts/make_spdx_profiles.py FOLDER

Each file is NAME.json with the keys osiApproved and licenseText.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lakh.corpus.licences.spdx_texts import PROFILES, word_pairs

TWINS = ("MPL-2.0-no-copyleft-exception", "OFL-1.1-RFN", "OFL-1.1-no-RFN", "OFL-1.0-RFN", "OFL-1.0-no-RFN")
"""Identifiers with the same text as another one."""
# Common licences that the Open Source Initiative has not approved.
ALSO = """
CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC-BY-NC-4.0 CC-BY-NC-SA-4.0 CC-BY-ND-4.0 CC-BY-NC-ND-4.0
CC0-1.0 CC-BY-NC-3.0 CC-BY-NC-SA-3.0 CC-BY-ND-3.0 CC-BY-NC-ND-3.0 WTFPL SSPL-1.0 BUSL-1.1 Elastic-2.0
JSON Vim OpenSSL OFL-1.1 curl X11 Ruby ODbL-1.0 GFDL-1.3-only GFDL-1.2-only BSD-4-Clause
BSD-3-Clause-Clear HPND ICU MIT-CMU Libpng libpng-2.0 bzip2-1.0.6 Beerware FTL IJG Info-ZIP TCL PSF-2.0
Python-2.0 NAIST-2003 Unicode-DFS-2016 Unicode-3.0 SGI-B-2.0 Spencer-94 TU-Berlin-2.0 ClArtistic
Artistic-1.0-Perl Apache-1.0 CDLA-Permissive-2.0 CECILL-2.0 CECILL-B CECILL-C EUPL-1.1
PolyForm-Noncommercial-1.0.0 Parity-7.0.0 Linux-man-pages-copyleft MulanPSL-1.0 NTP-0 PHP-3.01 Plexus
SMLNL SWL Sendmail Xerox blessing psutils snprintf MIT-feh MIT-advertising CPAL-1.0 BSD-Source-Code
BSD-Protection BSD-3-Clause-Attribution BSD-3-Clause-LBNL BSD-1-Clause AFL-2.1 OSL-2.1
"""


def make_profiles(folder: Path, target: Path = PROFILES) -> int:
    """Write the profiles of the licences in `folder`; returns their number."""
    names: list[str] = []
    sizes: list[int] = []
    rows: list[tuple[Any, ...]] = []
    for path in sorted(folder.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        name = path.stem
        if name.endswith(("-or-later", "+")) or name in TWINS or not (entry["osiApproved"] or name in ALSO.split()):
            continue
        if (folder / f"{name}-only.json").exists():
            continue  # the deprecated identifier
        text = entry["licenseText"]
        forms = [text]
        if name.startswith("LGPL-3.0"):  # SPDX appends the GPL; most repositories keep it in a separate file
            forms.append(text[: text.index("GNU GENERAL PUBLIC LICENSE\n")])
        for form in forms:
            pairs = word_pairs(form.encode())
            bag, counts = np.unique(pairs, return_counts=True)
            rows.append((bag, np.full(len(bag), len(names), np.uint16), np.minimum(counts, 255).astype(np.uint8)))
            names.append(name)
            sizes.append(len(pairs))
    keys, owners, counts = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.lexsort((owners, keys))
    with target.open("wb") as file:
        np.savez_compressed(
            file,
            names=np.frombuffer("\n".join(names).encode(), np.uint8),
            sizes=np.array(sizes, np.uint32),
            keys=keys[order],
            owners=owners[order],
            counts=counts[order],
        )
    return len(names)


if __name__ == "__main__":
    sys.stdout.write(f"{make_profiles(Path(sys.argv[1]))} licences\n")
