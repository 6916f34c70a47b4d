"""Files of held-out repositories as a folder, for `lakh eval MODEL --task bits-per-byte --data FOLDER`.

    python scripts/heldout_texts.py CORPUS OUT --bytes 2000000

Documents are taken in the order of a hash of their ids, so that many repositories have a part, until there are so many
bytes. CORPUS is what carry_corpus.py unpacked with --part heldout, or any corpus that was not trained on.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from lakh.corpus import read_documents


def main() -> None:
    parser = argparse.ArgumentParser(description="Write held-out files into a folder.")
    parser.add_argument("corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--bytes", type=int, default=2_000_000)
    asked = parser.parse_args()
    rows = [row for batch in read_documents(asked.corpus, ["id", "repo", "path", "text"]) for row in batch.to_pylist()]
    rows.sort(key=lambda row: hashlib.sha256(row["id"].encode()).digest())
    size = taken = 0
    for row in rows:
        if size >= asked.bytes:
            break
        path = asked.out / row["repo"] / row["path"]
        if path.suffix != ".py":
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(row["text"], encoding="utf-8")
        size, taken = size + len(row["text"].encode()), taken + 1
    print(f"{taken} files of {len({row['repo'] for row in rows})} repositories, {size} bytes")


if __name__ == "__main__":
    main()
