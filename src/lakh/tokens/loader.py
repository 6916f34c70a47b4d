"""Token shards to rows of training data.

The stream is a function of one integer: position k of the training stream is the same tokens, whoever asks, on however
many ranks, after however many restarts. State to save: the position, the seed, and the fingerprint of the data.

    position -> index       skips.py: what is passed over
    index    -> source      mixture.py: which token set, and the number of the sequence there
    number   -> row         order.py: a keyed bijection for each epoch
    row      -> pieces      layout.py: which tokens of which documents
    pieces   -> tokens      here, through fim.py

`Loader` is one source, `Stream` all of them. They hold no position and may be shared between threads. Fails with
UserError where a split is shorter than a row, and with what reading the shards fails with.
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
from lakh.tokens.fim import Fim, Segment, room_for
from lakh.tokens.layout import BestFit, Concat, Layout, Piece
from lakh.tokens.mixture import Mixture
from lakh.tokens.order import Order
from lakh.tokens.skips import Skips
from lakh.tokens.token_set import TokenSet
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Loader", "Rows", "Stream", "TokenSet", "data_fingerprint", "document_numbers"]

LAYOUTS: dict[str, Callable[[TokenSet, int], Layout]] = {"concat": Concat, "best-fit": BestFit}


@dataclass(frozen=True)
class Rows:
    """Rows of sequence + 1 tokens; what lies behind `lengths` is padding."""

    tokens: np.ndarray
    """rows x (sequence + 1), int32."""
    lengths: np.ndarray
    """rows, int32: tokens that are real."""
    starts: tuple[tuple[int, ...], ...]
    """For each row the positions at which another document begins (never 0; padding is one more)."""

    def __len__(self) -> int:
        return len(self.tokens)


class Loader:
    """One token set as an endless sequence of rows."""

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
        tokenizer = Tokenizer.load(tokens.tokenizer_path) if fim_rate > 0 or packing == "best-fit" else None
        self._pad = tokenizer.eot if tokenizer else 0
        self._fim = Fim(tokenizer, fim_rate, fim_spm, seed) if tokenizer and fim_rate > 0 else None
        self._layout: Layout = LAYOUTS[packing](tokens, sequence + 1 - room_for(sequence, fim_rate))
        self.num_windows = self._layout.num_rows
        """Rows in one epoch."""
        if not self.num_windows:
            raise UserError(
                f"{tokens.url}, {tokens.split}",
                f"holds {tokens.num_tokens} tokens, less than one sequence of {sequence} + 1",
                "choose a shorter sequence or pack more text",
            )
        self._order = Order(self.num_windows, seed)

    def rows(self, first_index: int, count: int) -> Rows:
        """Rows first_index .. first_index + count - 1 of this source."""
        return self.read(range(first_index, first_index + count))

    def read(self, indexes: Sequence[int]) -> Rows:
        windows = self._order.windows(np.asarray(indexes, np.int64)).tolist()
        places = [self._layout.row(window) for window in windows]
        rows = [[self.tokens.tokens[piece.shard][piece.start : piece.stop] for piece in row] for row in places]
        if self._fim is not None:
            rows = self._turned(self._fim, rows, places, indexes)
        return _stack(rows, self.sequence + 1, self._pad)

    def window_of(self, index: int) -> int:
        """The row of the layout that row `index` of the stream shows."""
        return int(self._order.windows(np.array([index]))[0])

    def _turned(
        self, fim: Fim, rows: list[list[np.ndarray]], places: list[list[Piece]], indexes: Sequence[int]
    ) -> list[list[np.ndarray]]:
        """The documents of each row, some of them in FIM form."""
        segments: list[Segment] = []
        spans: list[tuple[int, int, int, int]] = []  # row, document, start, stop of each segment
        for number, (row, pieces, index) in enumerate(zip(rows, places, indexes, strict=True)):
            epoch = index // self.num_windows
            for document, (ids, piece) in enumerate(zip(row, pieces, strict=True)):
                for start, stop, is_file in fim.segments(ids):
                    key = f"{epoch}:{piece.shard}:{piece.start + start}"
                    segments.append(Segment(ids[start:stop], key, is_file))
                    spans.append((number, document, start, stop))
        free = [self.sequence + 1 - sum(map(len, row)) for row in rows]
        changed: dict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = {}
        for (number, document, start, stop), turned in zip(spans, fim.turn(segments), strict=True):
            if turned is None or len(turned) - (stop - start) > free[number]:
                continue  # the row keeps its length and loses no token: such a text stays as it is
            free[number] -= len(turned) - (stop - start)
            changed.setdefault((number, document), []).append((start, stop, turned))
        for (number, document), changes in changed.items():
            rows[number][document] = _replaced(rows[number][document], changes)
        return rows


def _replaced(ids: np.ndarray, changes: Sequence[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """Other ids in the place of some, from the first place to the last."""
    parts, done = [], 0
    for start, stop, other in changes:
        parts += [ids[done:start], other]
        done = stop
    return np.concatenate([*parts, ids[done:]])


class Stream:
    """All sources of a run, mixed, with what is to be skipped left out: rows by their position."""

    def __init__(self, sources: Sequence[tuple[TokenSet, float]], data: Data, seed: int) -> None:
        self.sources = [tokens for tokens, _ in sources]
        self.sequence, self.fingerprint = data.sequence, data_fingerprint(sources)
        self.skips = Skips(data.skip)
        self._mixture = Mixture([weight for _, weight in sources], seed)
        self._loaders = [
            Loader(
                tokens,
                sequence=data.sequence,
                seed=seed + number,
                packing=data.packing,
                fim_rate=data.fim_rate,
                fim_spm=data.fim_spm,
            )
            for number, tokens in enumerate(self.sources)
        ]

    @staticmethod
    def open(data: Data, seed: int, split: str = "train") -> Stream:
        sources = data.mixture or (Source(tokens=data.tokens),)
        opened = [(TokenSet.open(source.tokens, split, cache=data.cache), source.weight) for source in sources]
        _require_one_tokenizer([tokens for tokens, _ in opened])
        return Stream(opened, data, seed)

    @property
    def num_rows(self) -> int:
        """Different rows that there are, over all sources."""
        return sum(loader.num_windows for loader in self._loaders)

    def rows(self, first_position: int, count: int) -> Rows:
        """Rows at positions first_position .. first_position + count - 1."""
        places = [self._mixture.locate(self.skips.index_of(first_position + i)) for i in range(count)]
        if len(self._loaders) == 1:
            return self._loaders[0].read([number for _, number in places])
        of_source: dict[int, list[int]] = {}
        for place, (source, _) in enumerate(places):
            of_source.setdefault(source, []).append(place)
        read = [self._loaders[source].read([places[at][1] for at in those]) for source, those in of_source.items()]
        back = np.argsort([at for those in of_source.values() for at in those])
        starts = [found for rows in read for found in rows.starts]
        return Rows(
            np.concatenate([rows.tokens for rows in read])[back],
            np.concatenate([rows.lengths for rows in read])[back],
            tuple(starts[at] for at in back.tolist()),
        )


def data_fingerprint(sources: Sequence[tuple[TokenSet, float]]) -> str:
    """What a checkpoint stores to know its data again: the token set's own, or one of all sources and weights."""
    if len(sources) == 1:
        return sources[0][0].fingerprint
    total = sum(weight for _, weight in sources)
    facts = [[tokens.fingerprint, round(weight / total, 9)] for tokens, weight in sources]
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


def document_numbers(rows: Rows) -> np.ndarray:
    """rows x sequence, int32: for each input token the number of its document in the row."""
    result = np.zeros(rows.tokens.shape, np.int32)
    counts = [len(starts) for starts in rows.starts]
    result[np.repeat(np.arange(len(rows)), counts), np.fromiter(itertools.chain(*rows.starts), np.int64)] = 1
    return np.cumsum(result[:, :-1], axis=1, dtype=np.int32)


def _stack(rows: Sequence[Sequence[np.ndarray]], width: int, pad: int) -> Rows:
    tokens = np.full((len(rows), width), pad, np.int32)
    lengths = np.empty(len(rows), np.int32)
    starts = []
    for number, documents in enumerate(rows):
        ends = np.cumsum([len(ids) for ids in documents])
        lengths[number] = ends[-1]
        np.concatenate(documents, out=tokens[number, : ends[-1]], casting="unsafe")
        starts.append(tuple(end for end in ends.tolist() if end < width))
    return Rows(tokens, lengths, tuple(starts))


def _require_one_tokenizer(sources: Sequence[TokenSet]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(
                "data.mixture",
                f"{other.url} was packed with another tokenizer than {first.url}",
                "pack them all with the same one",
            )
