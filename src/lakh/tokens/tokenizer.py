"""Text to token ids and back: byte-level BPE, trained on a corpus.

Ids 0..15 are special tokens, in the order of SPECIAL_TOKENS, and stand for what no text can say: where a
document ends, where a hole begins. Ordinary text never becomes one, even where it spells `<|endoftext|>`: a
corpus of code contains files about tokenizers, and such a file must not end half-way. Every byte has a
token, so any text survives the round trip; digits are single tokens, so numbers are read alike wherever
they stand.

Knows the `tokenizers` package; knows nothing of shards or models. A folder with a tokenizer holds
tokenizer.json, and manifest.json when `lakh tokens train` made it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh import storage
from lakh.corpus import read_documents, read_report
from lakh.corpus.document import Progress
from lakh.corpus.shards import manifest_to_reuse
from lakh.errors import DataError, UserError

__all__ = ["FILE", "SPECIAL_TOKENS", "Tokenizer", "Trained", "threads", "train"]

FILE = "tokenizer.json"
FORMAT = "lakh-tokenizer/1"
MADE_BY = "lakh tokens train CORPUS --out DIR"
SAMPLE_BYTES = 32_000_000
NUM_SPECIAL = 16
_NAMED = ("endoftext", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
SPECIAL_TOKENS = tuple(
    f"<|{name}|>" for name in (*_NAMED, *(f"reserved_{i}" for i in range(NUM_SPECIAL - len(_NAMED))))
)
MIN_VOCAB = NUM_SPECIAL + 256  # one token for each byte
MAX_VOCAB = 2**32


class Tokenizer:
    """A trained tokenizer. Frozen: its identity is the SHA-256 of its file."""

    def __init__(self, raw: bytes, where: str = FILE) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # noqa: BLE001 - the package raises bare Exception
            what = str(error).partition("\n")[0][:120]
            raise DataError(where, f"is no tokenizer ({what})", f"make one with: {MADE_BY}") from None
        self._inner.encode_special_tokens = True  # text that spells a special token stays text
        self._inner.no_truncation()
        self._inner.no_padding()
        self._raw, self._where = raw, where
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eot = self.special("<|endoftext|>")

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """From tokenizer.json, or a folder or URL that holds one."""
        url = str(path)
        if not url.endswith(".json") and not (storage.is_local(url) and storage.local_path(url).is_file()):
            if not storage.exists(url):
                raise UserError(url, "no such folder", f"make a tokenizer with: {MADE_BY}")
            url = storage.join(url, FILE)
        if not storage.exists(url):
            raise UserError(url, "no such file", f"make a tokenizer with: {MADE_BY}")
        return Tokenizer(storage.read_bytes(url), url)

    def save(self, folder: str | Path) -> str:
        """Write tokenizer.json into a folder, byte for byte as it was read; returns its URL."""
        url = storage.join(folder, FILE)
        storage.write_bytes(url, self._raw)
        return url

    def encode(self, text: str) -> list[int]:
        """Ids of a text; never a special one."""
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            found = "is not Unicode: it holds half of a surrogate pair"
            raise UserError("text", found, "send whole characters") from None
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for many texts, on several threads."""
        return [item.ids for item in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of these ids. A character cut in half becomes U+FFFD; special tokens are left out, or
        spelt.
        """
        text: str = self._inner.decode(list(ids), skip_special_tokens=not show_special)
        return text

    def special(self, token: str) -> int:
        """The id of a special token, e.g. "<|fim_prefix|>"."""
        number = self._inner.token_to_id(token)
        if number is None:
            raise UserError(self._where, f"has no token {token}", f"use one made with: {MADE_BY}")
        return int(number)

    @property
    def fim_prefix(self) -> int:
        return self.special("<|fim_prefix|>")

    @property
    def fim_middle(self) -> int:
        return self.special("<|fim_middle|>")

    @property
    def fim_suffix(self) -> int:
        return self.special("<|fim_suffix|>")


@dataclass(frozen=True)
class Trained:
    """What `train` made, or found."""

    out: str
    vocab: int
    vocab_asked: int
    """`vocab` is smaller where the sample has too few repeated words for more."""
    sampled_bytes: int
    tokenizer_sha256: str
    reused: bool = False


def train(
    corpus: str | Path,
    out: str | Path,
    *,
    vocab: int = 4096,
    sample_bytes: int = SAMPLE_BYTES,
    force: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train a tokenizer on about `sample_bytes` of a corpus and write it to `out`.

    Deterministic: the sample is a function of the documents' ids, and the words' counts do not depend on
    order. Costs memory for the distinct words of the sample, not for its text.
    """
    if not MIN_VOCAB <= vocab < MAX_VOCAB:
        found = f"{NUM_SPECIAL} special tokens and 256 bytes take {MIN_VOCAB}"
        raise UserError(f"vocab = {vocab}", found, f"choose {MIN_VOCAB} or more, for example 4096")
    if sample_bytes < 1:
        raise UserError(f"sample_bytes = {sample_bytes}", "is not positive", f"choose e.g. {SAMPLE_BYTES}")
    report = read_report(str(corpus))
    if not report.kept:
        raise UserError(str(corpus), "holds no documents", "see why with: lakh corpus report DIR")
    asked = {"corpus_sha256": report.output_sha256, "vocab_asked": vocab, "sample_bytes": sample_bytes}
    done = _finished(str(out), asked, force)
    if done is not None:
        return done
    storage.remove_tree(storage.join(out, storage.MANIFEST))
    sample = _Sample(str(corpus), report.bytes_out, sample_bytes, progress)
    with threads():
        raw = _learn(sample, vocab)
    made = Tokenizer(raw, storage.join(out, FILE))
    made.save(out)
    result = Trained(str(out), made.vocab_size, vocab, sample.taken_bytes, made.sha256)
    facts = {"vocab": result.vocab, "sampled_bytes": result.sampled_bytes, "tokenizer_sha256": result.tokenizer_sha256}
    storage.commit(out, {"format": FORMAT, "special_tokens": list(SPECIAL_TOKENS), **asked, **facts})
    return result


@contextlib.contextmanager
def threads() -> Iterator[None]:
    """Let `tokenizers` use its threads. Unset, it would guess, and warn whenever a process forks later on."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "true")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


class _Sample:
    """The texts of those documents whose id, read as a number, falls below a threshold: any order gives the
    same.
    """

    def __init__(self, corpus: str, corpus_bytes: int, sample_bytes: int, progress: Progress | None) -> None:
        self.corpus, self.corpus_bytes, self.progress = corpus, corpus_bytes, progress
        self.share = min(1.0, sample_bytes / max(1, corpus_bytes))
        self.taken_bytes = 0

    def __iter__(self) -> Iterator[str]:
        done = 0
        for batch in read_documents(self.corpus, ["id", "text"]):
            for identity, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                size = len(text.encode())
                done += size
                if int(identity[:13], 16) < self.share * 16**13:  # 52 bits are exact in a float
                    self.taken_bytes += size
                    yield text
            if self.progress:
                self.progress("reading", done, self.corpus_bytes)


def _learn(texts: Any, vocab: int) -> bytes:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(iter(texts), trainer)
    return bytes(inner.to_str(pretty=False).encode())


def _finished(out: str, asked: dict[str, Any], force: bool) -> Trained | None:
    manifest = manifest_to_reuse(out, kind=FORMAT, made_by=MADE_BY, force=force)
    if manifest is None:
        return None
    if any(manifest.get(name) != value for name, value in asked.items()):
        found = "already holds a tokenizer of another corpus, vocabulary or sample"
        raise UserError(out, found, "choose another --out, or replace it with --force")
    found_sha256 = Tokenizer.load(out).sha256
    if found_sha256 != manifest["tokenizer_sha256"]:
        raise DataError(storage.join(out, FILE), "does not match its manifest", "train it again with --force")
    return Trained(
        out, manifest["vocab"], manifest["vocab_asked"], manifest["sampled_bytes"], found_sha256, reused=True
    )
