"""Many texts to ids on all cores, in order and in bounded memory.

A large job uses the compiled encoder (fast.py), one per thread; a small one uses the `tokenizers` package, because
compiling takes longer than the job. The ids are the same. At most two batches per thread are on their way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lakh.tokens.fast import FastEncoder
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["encode_all"]

FAST_FROM_BYTES = 16_000_000


def encode_all(
    tokenizer: Tokenizer, batches: Iterable[Sequence[bytes]], *, total_bytes: int, workers: int = 0
) -> Iterator[list[np.ndarray]]:
    """The ids of each batch of UTF-8 texts, in the order of the batches. `total_bytes` is about the size of the job."""
    fast = FastEncoder.of(tokenizer.raw) if total_bytes >= FAST_FROM_BYTES else None
    if fast is None:
        for batch in batches:
            yield [np.asarray(ids, np.int32) for ids in tokenizer.encode_batch([text.decode() for text in batch])]
        return
    workers = workers or len(os.sched_getaffinity(0))
    idle = deque([fast, *(fast.sibling() for _ in range(workers - 1))])

    def work(batch: Sequence[bytes]) -> list[np.ndarray]:
        encoder = idle.pop()  # as many encoders as threads: there is always one
        try:
            found = encoder.encode(batch)
        finally:
            idle.append(encoder)
        return [
            ids if ids is not None else np.asarray(tokenizer.encode(text.decode()), np.int32)
            for ids, text in zip(found, batch, strict=True)
        ]

    with ThreadPoolExecutor(workers, thread_name_prefix="lakh-encode") as pool:
        on_their_way: deque[Future[list[np.ndarray]]] = deque()
        try:
            for batch in batches:
                on_their_way.append(pool.submit(work, batch))
                if len(on_their_way) > 2 * workers:
                    yield on_their_way.popleft().result()
            while on_their_way:
                yield on_their_way.popleft().result()
        finally:
            for future in on_their_way:
                future.cancel()
