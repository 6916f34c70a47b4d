"""Train a byte-level BPE tokenizer on a deterministic sample of a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import models, pre_tokenizers, trainers

from lakh import storage
from lakh.corpus import read_documents, read_report
from lakh.corpus.document import Progress
from lakh.errors import DataError, UserError
from lakh.tokens.tokenizer import FILE, MADE_BY, NUM_SPECIAL, SPECIAL_TOKENS, Tokenizer, threads
from lakh.tokens.tokenizer.tokenizer import byte_level_tokenizer

__all__ = ["TokenizerTrainingResult", "train"]

FORMAT = "lakh-tokenizer/1"
SAMPLE_BYTES = 32_000_000
MIN_VOCAB = NUM_SPECIAL + 256  # one token for each byte
MAX_VOCAB = 2**32


@dataclass(frozen=True)
class TokenizerTrainingResult:
    """The tokenizer that `train` made or reused."""

    out: str
    vocab: int
    vocab_asked: int
    """`vocab` is smaller if the sample has too few repeated pairs."""
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
) -> TokenizerTrainingResult:
    """Train a tokenizer on about `sample_bytes` of a corpus and write it to `out`.

    Deterministic: the sample depends on the documents' ids, and counting is independent of order. Memory grows with the
    distinct words of the sample, not with its text.
    """
    if not MIN_VOCAB <= vocab < MAX_VOCAB:
        found = f"{NUM_SPECIAL} special tokens and 256 bytes take {MIN_VOCAB}"
        raise UserError(f"vocab = {vocab}", found, f"choose {MIN_VOCAB} or more, for example 4096")
    if sample_bytes < 1:
        raise UserError(f"sample_bytes = {sample_bytes}", "is not positive", f"choose e.g. {SAMPLE_BYTES}")
    report = read_report(str(corpus))
    if not report.kept:
        raise UserError(str(corpus), "holds no documents", "see the reasons with: lakh corpus report DIR")
    asked = {"corpus_sha256": report.output_sha256, "vocab_asked": vocab, "sample_bytes": sample_bytes}
    done = _finished(str(out), asked, force)
    if done is not None:
        return done
    if not (force or storage.is_complete(out)) and storage.exists(storage.join(out, FILE)):  # of an exported model, say
        found = f"has a {FILE} that this would replace"
        raise UserError(str(out), found, "choose another --out, or replace it with --force")
    storage.remove_tree(storage.join(out, storage.MANIFEST))
    sample = _DocumentSample(str(corpus), report.bytes_out, sample_bytes, progress)
    with threads():
        raw = _train_bpe(sample, vocab)
    made = Tokenizer(raw, storage.join(out, FILE))
    made.save(out)
    result = TokenizerTrainingResult(str(out), made.vocab_size, vocab, sample.sampled_bytes, made.sha256)
    facts = {"vocab": result.vocab, "sampled_bytes": result.sampled_bytes, "tokenizer_sha256": result.tokenizer_sha256}
    storage.commit(out, {"format": FORMAT, "special_tokens": list(SPECIAL_TOKENS), **asked, **facts})
    return result


class _DocumentSample:
    """The texts of the documents whose id, read as a number, is below a threshold: independent of their order."""

    def __init__(self, corpus: str, corpus_bytes: int, sample_bytes: int, progress: Progress | None) -> None:
        self.corpus, self.corpus_bytes, self.progress = corpus, corpus_bytes, progress
        self.share = min(1.0, sample_bytes / max(1, corpus_bytes))
        self.sampled_bytes = 0

    def __iter__(self) -> Iterator[str]:
        done = 0
        for batch in read_documents(self.corpus, ["id", "text"]):
            for identity, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                size = len(text.encode())
                done += size
                if int(identity[:13], 16) < self.share * 16**13:  # 52 bits are exact in a float
                    self.sampled_bytes += size
                    yield text
            if self.progress:
                self.progress("reading", done, self.corpus_bytes)


def _train_bpe(texts: Any, vocab: int) -> bytes:
    inner = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(iter(texts), trainer)
    return bytes(inner.to_str(pretty=False).encode())


def _finished(out: str, asked: dict[str, Any], force: bool) -> TokenizerTrainingResult | None:
    manifest = storage.manifest_to_reuse(out, kind=FORMAT, made_by=MADE_BY, force=force)
    if manifest is None:
        return None
    if any(manifest.get(name) != value for name, value in asked.items()):
        found = "already holds a tokenizer of another corpus, vocabulary or sample"
        raise UserError(out, found, "choose another --out, or replace it with --force")
    found_sha256 = Tokenizer.load(out).sha256
    if found_sha256 != manifest["tokenizer_sha256"]:
        raise DataError(storage.join(out, FILE), "does not match its manifest", "train it again with --force")
    return TokenizerTrainingResult(
        out, manifest["vocab"], manifest["vocab_asked"], manifest["sampled_bytes"], found_sha256, reused=True
    )
