"""Encoding speed of lakh beside the `tokenizers` package: the same texts, the same ids, one thread each, one run.

    python -m bench.corpus.tokens CORPUS TOKENIZER [--mb 20]

Prints one JSON document: MB of text per CPU-second of each, their ratio, and that all ids are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from lakh.corpus import read_documents
from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer.fast_encoder import FastEncoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("tokenizer")
    parser.add_argument("--mb", type=float, default=20.0)
    asked = parser.parse_args()
    tokenizer = Tokenizer.load(asked.tokenizer)
    fast = FastEncoder.of(tokenizer.raw)
    assert fast is not None, "this tokenizer is not supported"
    texts: list[str] = []
    size = 0
    for batch in read_documents(asked.corpus, ["text"]):
        for text in batch.column(0).to_pylist():
            texts.append(text)
            size += len(text.encode())
        if size >= asked.mb * 1e6:
            break
    fast.encode([b"warm-up"])
    fast = fast.sibling()  # with an empty cache
    times: dict[str, float] = {}
    found: dict[str, Any] = {}
    for name, encode in (
        ("lakh", lambda: fast.encode([text.encode() for text in texts])),
        ("tokenizers", lambda: tokenizer.encode_batch(texts)),
    ):
        began = time.process_time()
        found[name] = encode()
        times[name] = time.process_time() - began
    left = sum(ids is None for ids in found["lakh"])
    same = all(a is None or list(a) == list(b) for a, b in zip(found["lakh"], found["tokenizers"], strict=True))
    rate = {name: size / 1e6 / seconds for name, seconds in times.items()}
    result = {
        "texts": len(texts),
        "mb": size / 1e6,
        "vocab": tokenizer.vocab_size,
        "mb_per_cpu_second": rate,
        "ratio": rate["lakh"] / rate["tokenizers"],
        "ids_equal": same,
        "left_to_the_package": left,
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
