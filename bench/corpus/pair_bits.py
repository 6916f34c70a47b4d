"""Fit the model of character pairs by which lakh.corpus.secrets tells random values from words.

    python -m bench.corpus.pair_bits OUT.npy DIR...

DIR are folders of source code without secrets. Counts each identifier and each text without blanks between quotes once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lakh.corpus.parsing.languages import language_of
from lakh.corpus.secrets.randomness import fit_pair_bits

WORD = re.compile(r"[A-Za-z_$][\w$]{3,60}|(?<=[\"'])[!-~]{4,60}(?=[\"'])")


def words_of(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and language_of(path.name):
                yield from WORD.findall(path.read_text("utf-8", "replace"))


if __name__ == "__main__":
    np.save(sys.argv[1], fit_pair_bits(words_of([Path(name) for name in sys.argv[2:]])))
