"""The training stream depends only on the position, with any packing, mixture, FIM and skips."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.spec import Data, Source
from lakh.tokens.dataset.layout import BestFitLayout, best_fit
from lakh.tokens.dataset.mixture import BLOCK, Mixture, counts_of
from lakh.tokens.dataset.packing import pack
from lakh.tokens.loading.digest import StreamDigest, digest_sequences
from lakh.tokens.loading.fim import reserved_tokens
from lakh.tokens.loading.skips import SkipRanges
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader, TokenStream
from lakh.tokens.tokenizer import Tokenizer

SEQUENCE = 48


@pytest.fixture(scope="module")
def packed(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack(corpus, tokenizer, folder, heldout_fraction=0.1, shard_tokens=900)
    return folder


@pytest.fixture(scope="module")
def other(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    pack(corpus, tokenizer, folder, heldout_fraction=0, order="repository")
    return folder


def data_of(packed: Path, other: Path | None = None, **more: object) -> Data:
    sources = (Source(tokens=str(packed), weight=3), Source(tokens=str(other), weight=1)) if other else ()
    return Data(tokens=str(packed), sequence=SEQUENCE, batch=12, micro_batch=1, mixture=sources, **more)  # type: ignore[arg-type]


# --- the whole -----------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    micro=st.sampled_from([1, 2, 5]),
    resume=st.integers(0, 6),
    seed=st.integers(0, 50),
    packing=st.sampled_from(["concat", "best-fit"]),
    fim=st.sampled_from([0.0, 0.5]),
    mixed=st.booleans(),
    skip=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=3),
)
def test_ranks_micro_batches_and_restarts_do_not_change_the_stream(
    packed: Path, other: Path, ranks: int, micro: int, resume: int, seed: int, packing, fim, mixed, skip
) -> None:
    ranges = tuple((first, first + size) for first, size in skip)
    data = data_of(packed, other if mixed else None, packing=packing, fim_rate=fim, skip=ranges)
    batch, steps = data.batch, 6
    whole = TokenStream(data, seed).read_range(0, batch * steps)
    want = digest_sequences(0, whole.tokens, whole.lengths)
    got, tokens = StreamDigest(), []
    for first, last in ((0, resume), (resume, steps)):
        stream = TokenStream(data, seed)  # a restart: no state is kept
        for step in range(first, last):
            share = batch // ranks
            for rank in reversed(range(ranks)):  # who comes first does not matter to the hash
                begin = step * batch + rank * share
                for at in range(0, share, micro):
                    rows = stream.read_range(begin + at, min(micro, share - at))
                    got += digest_sequences(begin + at, rows.tokens, rows.lengths)
                    tokens.append((begin + at, rows.tokens))
    assert got == want
    assert np.array_equal(np.concatenate([part for _, part in sorted(tokens, key=lambda item: item[0])]), whole.tokens)


def test_the_hash_detects_changed_swapped_and_repeated_rows(packed: Path) -> None:
    rows = TokenStream(data_of(packed), 1).read_range(0, 6)
    good = digest_sequences(0, rows.tokens, rows.lengths)
    changed = rows.tokens.copy()
    changed[3, 7] += 1
    swapped = rows.tokens[[0, 2, 1, 3, 4, 5]]
    for tokens in (changed, swapped):
        assert digest_sequences(0, tokens, rows.lengths).sha256 != good.sha256
    assert (good + digest_sequences(0, rows.tokens[:1], rows.lengths[:1])).sha256 != good.sha256


# --- packing -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(30, 64))
def test_best_fit_overfills_no_row_and_wastes_little(lengths: list[int], capacity: int) -> None:
    rows = best_fit(lengths, capacity)
    fill = np.bincount(rows, weights=lengths)
    assert fill.max() <= capacity
    assert (fill > 0).all()  # rows are numbered without gaps
    # Two rows that both are at most half full would have been one: so all but one are more than half full.
    assert (fill * 2 > capacity).sum() >= len(fill) - 1


@pytest.mark.parametrize("capacity", [9, 33, 200])
def test_best_fit_keeps_all_tokens_and_splits_only_long_documents(
    packed: Path, tokenizer: Tokenizer, capacity: int
) -> None:
    tokens = TokenSet.open(packed, "train")
    layout = BestFitLayout(tokens, capacity)
    covered = [np.zeros(len(shard), int) for shard in tokens.tokens]
    for index in range(layout.num_sequences):
        pieces = layout.spans(index)
        assert sum(piece.stop - piece.start for piece in pieces) <= capacity
        for piece in pieces:
            covered[piece.shard][piece.start : piece.stop] += 1
            starts = tokens.starts[piece.shard]
            whole = piece.start in starts and (piece.stop in starts or piece.stop == len(covered[piece.shard]))
            document = np.searchsorted(starts, piece.start, side="right") - 1
            ends = [*starts[1:], len(covered[piece.shard])]
            assert whole or ends[document] - starts[document] > capacity
            assert piece.stop <= ends[document]  # never into the next document
    for shard, times in zip(tokens.tokens, covered, strict=True):
        assert times.min() >= 1
        again = np.flatnonzero(times > 1)  # shared by neighbouring rows of one long document, like in concat
        assert times.max() <= 2
        assert (np.asarray(shard)[again] != tokenizer.eot).all()


def test_padding_is_a_separate_document(packed: Path) -> None:
    rows = TokenStream(data_of(packed, packing="best-fit"), 1).read_range(0, 40)
    short = rows.lengths < SEQUENCE + 1
    assert short.any()
    for length, starts in zip(rows.lengths[short].tolist(), np.array(rows.starts, object)[short], strict=True):
        assert length in starts


# --- mixture and skips ---------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=6), st.integers(0, 5))
def test_shares_are_exact_in_every_block(weights: list[float], block: int) -> None:
    mixture = Mixture(weights, seed=3)
    found = [mixture.locate(index) for index in range(block * BLOCK, (block + 1) * BLOCK)]
    for source, count in enumerate(counts_of(weights)):
        numbers = sorted(number for where, number in found if where == source)
        assert numbers == list(range(block * count, (block + 1) * count))
        assert abs(count - weights[source] / sum(weights) * BLOCK) < 1


def test_a_weight_below_one_sequence_per_block_is_rejected() -> None:
    with pytest.raises(UserError, match="larger weight"):
        counts_of([1.0, 1e-6])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=5), st.integers(0, 60))
def test_skips_remove_exactly_the_named_ranges(spans: list[tuple[int, int]], position: int) -> None:
    skips = SkipRanges((first, first + size) for first, size in spans)
    hidden = {index for first, size in spans for index in range(first, first + size)}
    shown = [index for index in range(400) if index not in hidden]
    assert skips.index_of(position) == shown[position]
    more = skips.with_positions(position, position + 3)
    assert [more.index_of(k) for k in range(position)] == shown[:position]
    assert more.index_of(position) == shown[position + 3]


def test_sources_with_different_tokenizers_are_rejected(corpus: Path, packed: Path, tmp_path: Path) -> None:
    from lakh.tokens.tokenizer.training import train

    train(corpus, tmp_path / "words", vocab=300)
    pack(corpus, tmp_path / "words", tmp_path / "set", heldout_fraction=0.1)
    with pytest.raises(UserError, match="different tokenizers"):
        TokenStream(data_of(packed, tmp_path / "set"), 1)


# --- fill in the middle --------------------------------------------------------------------------


def plain_text(ids: list[int], t: Tokenizer) -> str:
    """A document in PSM or SPM form, put back into its order."""
    pre, suf, mid = (t.special(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle"))
    ids = [i for i in ids if i != t.eot]
    if pre not in ids:
        return t.decode(ids)
    assert ids[0] == pre
    s, m = ids.index(suf), ids.index(mid)
    first, suffix, last = t.decode(ids[1:s]), t.decode(ids[s + 1 : m]), t.decode(ids[m + 1 :])
    return first + last + suffix


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_fim_documents_hold_the_same_text_and_rows_never_overflow(
    packed: Path, tokenizer: Tokenizer, packing: str
) -> None:
    tokens = TokenSet.open(packed, "train")
    loader = TokenSetLoader(tokens, sequence=128, seed=5, packing=packing, fim_rate=0.7)
    rows, layout = loader.read(range(loader.num_sequences)), loader._layout
    prefix, suffix = (tokenizer.special(token) for token in ("<|fim_prefix|>", "<|fim_suffix|>"))
    order = loader._order.permute(np.arange(loader.num_sequences)).tolist()
    marked = forms = 0
    for index in range(loader.num_sequences):
        edges = [0, *rows.starts[index], int(rows.lengths[index])]
        pieces = layout.spans(order[index])
        for piece, (a, b) in zip(pieces, itertools.pairwise(edges), strict=False):
            found = rows.tokens[index, a:b].tolist()
            raw = tokens.tokens[piece.shard][piece.start : piece.stop].tolist()
            assert plain_text(found, tokenizer) == plain_text(raw, tokenizer)
            marked += prefix in found
            forms += found[:2] == [prefix, suffix]
    assert rows.lengths.max() <= 129
    assert marked > 20
    assert 0 < forms < marked  # both forms occur


def test_fim_splits_depend_on_the_epoch_and_the_seed(packed: Path) -> None:
    tokens = TokenSet.open(packed, "train")
    loaders = [TokenSetLoader(tokens, sequence=128, seed=seed, fim_rate=1.0) for seed in (5, 5, 6)]
    count = loaders[0].num_sequences
    first, again, other = (loader.read(range(count)).tokens for loader in loaders)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    order = loaders[0]._order.permute(np.arange(2 * count)).tolist()
    by_window = dict(zip(order, first, strict=False))
    later = loaders[0].read(range(count, 2 * count)).tokens
    same = sum(np.array_equal(row, by_window[window]) for window, row in zip(order[count:], later, strict=True))
    assert same < count / 2


def test_tokens_are_reserved_only_with_fim() -> None:
    assert reserved_tokens(4096, 0.0) == 0
    assert reserved_tokens(4096, 0.5) == 64


# --- repositories --------------------------------------------------------------------------------


def test_a_repository_is_one_document_with_paths(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0, order="repository")
    tokens = TokenSet.open(tmp_path, "train")
    assert tokens.num_documents == 1
    text = tokenizer.decode(np.asarray(tokens.tokens[0]).tolist(), show_special=True)
    assert text.startswith("<|repo_name|>proj<|file_sep|>")
    assert text.endswith("<|endoftext|>")
    files = text.removesuffix("<|endoftext|>").split("<|file_sep|>")[1:]
    assert len(files) == 121
    heads = [file.partition("\n")[0] for file in files]
    assert set(heads) == {*(f"f{i}.py" for i in range(120)), "trap.py"}
    body = next(file for file in files if file.startswith("f3.py\n")).partition("\n")[2]
    assert body == (corpus.parent / "proj" / "f3.py").read_text()


def test_fim_transforms_each_file_and_keeps_its_path_in_the_prefix(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0, order="repository")
    loader = TokenSetLoader(TokenSet.open(tmp_path, "train"), sequence=512, seed=1, fim_rate=1.0, fim_spm=0.0)
    texts = [
        tokenizer.decode(row.tolist(), show_special=True) for row in loader.read(range(loader.num_sequences)).tokens
    ]
    transformed = [part for text in texts for part in text.split("<|file_sep|>")[1:-1] if "<|fim_prefix|>" in part]
    assert transformed
    for part in transformed:
        assert part.startswith("<|fim_prefix|>")
        assert part.removeprefix("<|fim_prefix|>").partition("\n")[0].endswith(".py")
