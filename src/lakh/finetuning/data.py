"""The data of fine-tuning: a token set to train on, and held-out documents to measure with.

Sources are JSONL files of questions and answers (examples.py), folders with a user's own code, or one token set of
`lakh tokens pack`. Code is cleaned by the corpus pipeline, whatever its licence: it is the user's own. The hash of a
document decides whether it is held out, so that the same data always gives the same documents: a tenth of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lakh import storage
from lakh.corpus import Settings, build, read_documents
from lakh.corpus.filters.licence import LicenceSettings
from lakh.errors import UserError
from lakh.evals.perplexity import ScoredDocument
from lakh.finetuning.examples import ExampleEncoder, TuningExample, read_examples
from lakh.server.model.weights import LoadedModel
from lakh.server.prompts.chat_template import ChatTemplate
from lakh.tokens.dataset.packing import is_heldout, pack, sort_key
from lakh.tokens.dataset.shards import CONTEXT, TokenSetWriter, read_token_manifest
from lakh.tokens.dataset.token_set import TokenSet
from lakh.tokens.tokenizer import Tokenizer
from lakh.trainer.run_folder import has_checkpoints

__all__ = ["HELDOUT_SHARE", "MAX_SCORED", "TuningData", "heldout_limit", "prepare", "split_keys"]

HELDOUT_SHARE = 0.1
MAX_SCORED = 64  # held-out documents that are measured before and after


@dataclass(frozen=True)
class TuningData:
    kind: Literal["examples", "code", "tokens"]
    tokens: str
    """Folder of the token set."""
    heldout: tuple[ScoredDocument, ...]
    too_long: int = 0
    """Examples that do not fit into a sequence and were left out."""


def prepare(
    model: LoadedModel, sources: Sequence[str], out: str, sequence: int, say: Callable[[str], None]
) -> TuningData:
    """Write the data of a run into its folder `out`. `sequence`: tokens of a training sequence."""
    tokenizer = Tokenizer.load(model.tokenizer_json)
    if tokenizer.vocab_size > model.spec.vocab:
        found = f"has {tokenizer.vocab_size:,} tokens; the model's vocabulary has {model.spec.vocab:,}"
        raise UserError(str(model.tokenizer_json), found, "use the tokenizer of the model")
    examples = [source for source in sources if source.endswith(".jsonl")]
    if examples and len(examples) < len(sources):
        other = next(source for source in sources if source not in examples)
        raise UserError(f"--data {other}", "is code beside JSONL files", "fine-tune on one kind of data")
    if examples:
        return _from_examples(model, tokenizer, examples, storage.join(out, "tokens"), sequence)
    for source in sources:
        if storage.is_local(source) and not storage.exists(source):
            raise UserError(f"--data {source}", "no such file or folder", "give JSONL files, or folders of code")
    if len(sources) == 1 and {"train", "heldout", storage.MANIFEST} <= set(storage.list_dir(sources[0])):
        return _from_tokens(tokenizer, sources[0])
    say("reading the code")
    corpus, tokens = storage.join(out, "corpus"), storage.join(out, "tokens")
    settings = Settings(licences=LicenceSettings(take=("permissive", "copyleft", "none", "unknown")))
    _make_or_replace(lambda force: build(list(sources), corpus, settings, force=force), out)
    rows = [row for batch in read_documents(corpus, ["id", "path", "text", "sha256"]) for row in batch.to_pylist()]
    share = heldout_limit([row["sha256"] for row in rows], ", ".join(sources))
    _make_or_replace(lambda force: pack(corpus, tokenizer, tokens, heldout_fraction=share, force=force), out)
    rows = [row for row in rows if is_heldout(row["sha256"], share)]
    rows.sort(key=lambda row: sort_key(row["id"]))
    documents = [ScoredDocument.of(row["path"], row["text"], tokenizer) for row in rows[:MAX_SCORED]]
    return TuningData("code", tokens, tuple(documents))


def _make_or_replace(make: Callable[[bool], object], out: str) -> None:
    """Make a set of files, or replace one of other input that an earlier call has left without a run."""
    try:
        make(False)
    except UserError:
        if has_checkpoints(out):
            raise
        make(True)


def heldout_limit(hashes: Sequence[str], where: str) -> float:
    """The share of hashes below which a tenth of these documents lies, and at least one."""
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        found = f"holds {len(distinct)} documents to train on and to measure with"
        raise UserError(where, found, "give at least two; lakh corpus report shows what was left out, and why")
    last = distinct[max(1, round(HELDOUT_SHARE * len(distinct))) - 1]
    return (int(last[:13], 16) + 1) / 16**13  # as is_heldout compares


def split_keys(examples: Sequence[TuningExample]) -> list[str]:
    """What decides whether an example is held out: its question, so that all answers to one are on the same side. Where
    a fifth of all examples have the same question, as with an empty prompt, question and answer."""
    counts = Counter(questions := [example.question_sha256 for example in examples])
    most = max(2, len(examples) // 5)
    return [
        example.sha256 if counts[question] > most else question
        for example, question in zip(examples, questions, strict=True)
    ]


def _from_examples(
    model: LoadedModel, tokenizer: Tokenizer, files: Sequence[str], out: str, sequence: int
) -> TuningData:
    encoder = ExampleEncoder(tokenizer, ChatTemplate.load(str(model.tokenizer_json.parent)))
    examples = list(read_examples(files, encoder))
    fitting = [example for example in examples if len(example.ids) <= sequence]  # and the end
    if len(fitting) < 2:
        found = f"{len(fitting)} examples of at most {sequence} tokens were found, {len(examples)} in all"
        raise UserError(", ".join(files), found, "give at least two, or a longer data.sequence")
    keys = split_keys(fitting)
    share = heldout_limit(keys, ", ".join(files))
    pairs = sorted(zip(keys, fitting, strict=True), key=lambda pair: sort_key(pair[1].sha256))
    heldout = [example for key, example in pairs if is_heldout(key, share)]
    with TokenSetWriter(out, tokenizer, marks_context=True) as writer:
        for key, example in pairs:
            marks = np.where(example.is_answer, 0, CONTEXT)
            writer.add("heldout" if is_heldout(key, share) else "train", np.array(example.ids) + marks)
        writer.commit({"made_from": "examples"})
    documents = [
        _scored(f"example {number}", example, tokenizer) for number, example in enumerate(heldout[:MAX_SCORED], start=1)
    ]
    return TuningData("examples", out, tuple(documents), too_long=len(examples) - len(fitting))


def _scored(name: str, example: TuningExample, tokenizer: Tokenizer) -> ScoredDocument:
    answer = tokenizer.decode([token for token, learned in zip(example.ids, example.is_answer, strict=True) if learned])
    return ScoredDocument(name, example.ids, len(answer.encode()), example.is_answer)


def _from_tokens(tokenizer: Tokenizer, url: str) -> TuningData:
    manifest = read_token_manifest(url)
    if manifest["tokenizer_sha256"] != tokenizer.sha256:
        raise UserError(f"--data {url}", "was packed with another tokenizer", "pack it with the model's tokenizer")
    heldout = TokenSet.open(url, "heldout")
    documents: list[ScoredDocument] = []
    for ids, starts in zip(heldout.tokens, heldout.starts, strict=True):
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(ids)], strict=True):
            document = np.asarray(ids[start : end - 1]).astype(np.int64)
            is_answer, plain = document < CONTEXT, document & ~CONTEXT
            size = len(tokenizer.decode(plain[is_answer].tolist()).encode())
            if size and len(documents) < MAX_SCORED:
                name = f"document {len(documents) + 1}"
                documents.append(ScoredDocument(name, tuple(plain.tolist()), size, tuple(is_answer.tolist())))
    return TuningData("tokens", url, tuple(documents))
