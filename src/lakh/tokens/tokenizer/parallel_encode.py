"""Encode many texts on all cores, in order and in bounded memory.

A large job uses one compiled encoder per thread (fast_encoder.py); a small one uses the `tokenizers` package, because
compiling would take longer than the job. The ids are the same. At most two batches per thread are in progress.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer.fast_encoder import FastEncoder

__all__ = ["encode_all"]

FAST_FROM_BYTES = 16_000_000


def encode_all(
    tokenizer: Tokenizer, batches: Iterable[Sequence[bytes]], *, total_bytes: int, workers: int = 0
) -> Iterator[list[np.ndarray]]:
    """The ids of each batch of UTF-8 texts, in order. `total_bytes` is the approximate size of the job."""
    fast = FastEncoder.of(tokenizer.raw) if total_bytes >= FAST_FROM_BYTES else None
    if fast is None:
        for batch in batches:
            yield [np.asarray(ids, np.int32) for ids in tokenizer.encode_batch([text.decode() for text in batch])]
        return
    workers = workers or len(os.sched_getaffinity(0))
    idle = deque([fast, *(fast.sibling() for _ in range(workers - 1))])

    def work(batch: Sequence[bytes]) -> list[np.ndarray]:
        encoder = idle.pop()  # as many encoders as threads
        try:
            found = encoder.encode(batch)
        finally:
            idle.append(encoder)
        return [
            ids if ids is not None else np.asarray(tokenizer.encode(text.decode()), np.int32)
            for ids, text in zip(found, batch, strict=True)
        ]

    with ThreadPoolExecutor(workers, thread_name_prefix="lakh-encode") as pool:
        in_progress: deque[Future[list[np.ndarray]]] = deque()
        try:
            for batch in batches:
                in_progress.append(pool.submit(work, batch))
                if len(in_progress) > 2 * workers:
                    yield in_progress.popleft().result()
            while in_progress:
                yield in_progress.popleft().result()
        finally:
            for future in in_progress:
                future.cancel()
