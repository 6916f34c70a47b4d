"""The training stream: token shards to sequences of training data.

Position k of the stream is the same tokens on any number of ranks and after any number of restarts. The state to save
is the position, the seed and the fingerprint of the data.

    position -> index       skips.py: without the skipped sequences
    index    -> source      mixture.py: the token set, and the number of the sequence in it
    number   -> sequence    dataset/shuffle.py: a keyed bijection for each epoch
    sequence -> spans       dataset/layout.py: tokens of documents
    spans    -> tokens      this module, through fim.py

`TokenSetLoader` reads one source, `TokenStream` all sources of a run. They hold no position and can be shared between
threads. `open_data` checks the data of a run without torch, so that the launcher can reject a run before it starts
ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lakh.errors import UserError
from lakh.spec import Data, Source
from lakh.tokens.dataset.layout import BestFitLayout, ConcatLayout, SequenceLayout, TokenSpan
from lakh.tokens.dataset.mixture import Mixture
from lakh.tokens.dataset.shuffle import ShuffleOrder
from lakh.tokens.dataset.token_set import TokenSet
from lakh.tokens.loading.fim import FimSegment, FimTransform, reserved_tokens
from lakh.tokens.loading.skips import SkipRanges
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["SequenceBatch", "TokenSet", "TokenSetLoader", "TokenStream", "document_numbers", "open_data"]

LAYOUTS: dict[str, Callable[[TokenSet, int], SequenceLayout]] = {"concat": ConcatLayout, "best-fit": BestFitLayout}


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences of `sequence` + 1 tokens, padded behind their `lengths`."""

    tokens: np.ndarray
    """count x (sequence + 1), int32; the bit CONTEXT (dataset/shards.py) marks tokens that are not predicted."""
    lengths: np.ndarray
    """count, int32: tokens without padding."""
    starts: tuple[tuple[int, ...], ...]
    """For each sequence the positions at which another document begins (never 0; padding counts as a document)."""

    def __len__(self) -> int:
        return len(self.tokens)


class TokenSetLoader:
    """One token set as an endless list of sequences."""

    def __init__(
        self,
        tokens: TokenSet,
        *,
        sequence: int,
        seed: int,
        packing: str = "concat",
        fim_rate: float = 0.0,
        fim_spm: float = 0.5,
    ) -> None:
        self.tokens, self.sequence, self.seed = tokens, sequence, seed
        if tokens.marks_context and fim_rate > 0:
            found = f"{tokens.url} holds questions and answers, which have no middle to fill in"
            raise UserError("data.fim_rate", found, "set data.fim_rate = 0")
        tokenizer = Tokenizer.load(tokens.tokenizer_path) if fim_rate > 0 or packing == "best-fit" else None
        self._pad = tokenizer.eot if tokenizer else 0
        self._fim = FimTransform(tokenizer, fim_rate, fim_spm, seed) if tokenizer and fim_rate > 0 else None
        self._layout: SequenceLayout = LAYOUTS[packing](tokens, sequence + 1 - reserved_tokens(sequence, fim_rate))
        self.num_sequences = self._layout.num_sequences
        """Sequences in one epoch."""
        if not self.num_sequences:
            raise UserError(
                f"{tokens.url}, {tokens.split}",
                f"holds {tokens.num_tokens} tokens, less than one sequence of {sequence} + 1",
                "choose a shorter sequence or pack more text",
            )
        self._order = ShuffleOrder(self.num_sequences, seed)

    def read(self, indexes: Sequence[int]) -> SequenceBatch:
        layouts = [self._layout.spans(number) for number in self._order.permute(np.asarray(indexes, np.int64)).tolist()]
        self.tokens.check_unchanged({span.shard for spans in layouts for span in spans})
        sequences = [[self.tokens.tokens[span.shard][span.start : span.stop] for span in spans] for spans in layouts]
        if self._fim is not None:
            sequences = self._with_fim(self._fim, sequences, layouts, indexes)
        return _stack(sequences, self.sequence + 1, self._pad)

    def _with_fim(
        self,
        fim: FimTransform,
        sequences: list[list[np.ndarray]],
        layouts: list[list[TokenSpan]],
        indexes: Sequence[int],
    ) -> list[list[np.ndarray]]:
        """The documents of each sequence, some of them in FIM form."""
        segments: list[FimSegment] = []
        where: list[tuple[int, int, int, int]] = []  # sequence, document, start, stop of each segment
        for number, (documents, spans, index) in enumerate(zip(sequences, layouts, indexes, strict=True)):
            epoch = index // self.num_sequences
            for document, (ids, span) in enumerate(zip(documents, spans, strict=True)):
                for start, stop, is_file in fim.segments(ids):
                    key = f"{epoch}:{span.shard}:{span.start + start}"
                    segments.append(FimSegment(ids[start:stop], key, is_file))
                    where.append((number, document, start, stop))
        free = [self.sequence + 1 - sum(map(len, documents)) for documents in sequences]
        changed: dict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = {}
        for (number, document, start, stop), transformed in zip(where, fim.transform(segments), strict=True):
            if transformed is None or len(transformed) - (stop - start) > free[number]:
                continue  # no room for the FIM tokens: keep the text unchanged
            free[number] -= len(transformed) - (stop - start)
            changed.setdefault((number, document), []).append((start, stop, transformed))
        for (number, document), changes in changed.items():
            sequences[number][document] = _replaced(sequences[number][document], changes)
        return sequences


def _replaced(ids: np.ndarray, changes: Sequence[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """The ids with each range start .. stop - 1 replaced."""
    parts, done = [], 0
    for start, stop, other in changes:
        parts += [ids[done:start], other]
        done = stop
    return np.concatenate([*parts, ids[done:]])


class TokenStream:
    """All sources of a run, mixed, without the skipped sequences."""

    def __init__(self, data: Data, seed: int) -> None:
        sources = open_sources(data)
        self.sources = [tokens for tokens, _ in sources]
        _require_one_tokenizer(self.sources)
        self.sequence, self.fingerprint = data.sequence, data_fingerprint(sources)
        self.skips = SkipRanges(data.skip)
        self._mixture = Mixture([weight for _, weight in sources], seed)
        self._loaders = [
            TokenSetLoader(
                tokens,
                sequence=data.sequence,
                seed=seed + number,
                packing=data.packing,
                fim_rate=data.fim_rate,
                fim_spm=data.fim_spm,
            )
            for number, tokens in enumerate(self.sources)
        ]

    def read_range(self, first_position: int, count: int) -> SequenceBatch:
        """Sequences at positions first_position .. first_position + count - 1."""
        located = [self._mixture.locate(self.skips.index_of(first_position + i)) for i in range(count)]
        if len(self._loaders) == 1:
            return self._loaders[0].read([number for _, number in located])
        by_source: dict[int, list[int]] = {}
        for offset, (source, _) in enumerate(located):
            by_source.setdefault(source, []).append(offset)
        parts = [
            self._loaders[source].read([located[at][1] for at in offsets]) for source, offsets in by_source.items()
        ]
        back = np.argsort([at for offsets in by_source.values() for at in offsets])
        starts = [found for part in parts for found in part.starts]
        return SequenceBatch(
            np.concatenate([part.tokens for part in parts])[back],
            np.concatenate([part.lengths for part in parts])[back],
            tuple(starts[at] for at in back.tolist()),
        )


def open_sources(data: Data) -> list[tuple[TokenSet, float]]:
    """The training split of each source, and its weight."""
    sources = data.mixture or (Source(tokens=data.tokens),)
    return [(TokenSet.open(source.tokens, "train", cache=data.cache), source.weight) for source in sources]


@dataclass(frozen=True)
class TrainingData:
    """The data of a run."""

    fingerprint: str
    tokenizer_path: str
    heldout: TokenSet


def open_data(data: Data, vocab: int) -> TrainingData:
    """Open every source of a run. Raises UserError if the data does not fit the settings or the vocabulary."""
    opened = open_sources(data)
    heldout = TokenSet.open(data.tokens, "heldout", cache=data.cache)
    for tokens in (*(tokens for tokens, _ in opened), heldout):
        if tokens.vocab > vocab:
            raise UserError(
                f"model.vocab = {vocab}",
                f"is smaller than the tokenizer of {tokens.url} ({tokens.vocab})",
                f"set model.vocab = {tokens.vocab} or more, or pack with a smaller tokenizer",
            )
    available = sum(tokens.count_sequences(data.sequence) for tokens, _ in opened)
    for name, found, needed in (("train", available, data.batch), ("heldout", heldout.num_documents, 1)):
        if found < needed:
            raise UserError(
                f"{data.tokens}, {name}",
                f"holds {found} sequences of {data.sequence} tokens; {needed} are needed",
                "pack a larger corpus, or make data.batch or data.sequence smaller",
            )
    return TrainingData(data_fingerprint(opened), opened[0][0].tokenizer_path, heldout)


def data_fingerprint(sources: Sequence[tuple[TokenSet, float]]) -> str:
    """Identifies the data of a run: the token set's fingerprint, or a hash of all sources and weights."""
    if len(sources) == 1:
        return sources[0][0].fingerprint
    total = sum(weight for _, weight in sources)
    facts = [[tokens.fingerprint, round(weight / total, 9)] for tokens, weight in sources]
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


def document_numbers(batch: SequenceBatch) -> np.ndarray:
    """count x sequence, int32: for each input token the number of its document in the sequence."""
    result = np.zeros(batch.tokens.shape, np.int32)
    counts = [len(starts) for starts in batch.starts]
    result[np.repeat(np.arange(len(batch)), counts), np.fromiter(itertools.chain(*batch.starts), np.int64)] = 1
    return np.cumsum(result[:, :-1], axis=1, dtype=np.int32)


def _stack(sequences: Sequence[Sequence[np.ndarray]], width: int, pad: int) -> SequenceBatch:
    tokens = np.full((len(sequences), width), pad, np.int32)
    lengths = np.empty(len(sequences), np.int32)
    starts = []
    for number, documents in enumerate(sequences):
        ends = np.cumsum([len(ids) for ids in documents])
        lengths[number] = ends[-1]
        np.concatenate(documents, out=tokens[number, : ends[-1]], casting="unsafe")
        starts.append(tuple(end for end in ends.tolist() if end < width))
    return SequenceBatch(tokens, lengths, tuple(starts))


def _require_one_tokenizer(sources: Sequence[TokenSet]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(
                "data.mixture",
                f"{other.url} and {first.url} were packed with different tokenizers",
                "pack all sources with the same tokenizer",
            )
