from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.tokens.dataset.layout import ConcatLayout
from lakh.tokens.dataset.shards import TokenSetWriter, dtype_for
from lakh.tokens.dataset.shuffle import ShuffleOrder
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader, document_numbers
from lakh.tokens.tokenizer import Tokenizer

# --- the order -----------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_an_epoch_visits_every_window_once(count: int, seed: int, epoch: int) -> None:
    visited = ShuffleOrder(count, seed).permute(np.arange(epoch * count, (epoch + 1) * count))
    assert sorted(visited.tolist()) == list(range(count))


@given(st.integers(100, 3000), st.integers(0, 2**32))
def test_epochs_and_seeds_have_different_orders(count: int, seed: int) -> None:
    order, other = ShuffleOrder(count, seed), ShuffleOrder(count, seed + 1)
    first = order.permute(np.arange(count))
    assert first.tolist() != order.permute(np.arange(count, 2 * count)).tolist()
    assert first.tolist() != other.permute(np.arange(count)).tolist()
    assert first.tolist() != list(range(count))


def test_the_order_never_changes() -> None:
    """Golden: checkpoints store an index into this order, so it may never change."""
    assert ShuffleOrder(10, 1).permute(np.arange(20)).tolist() == GOLDEN_ORDER


def test_huge_orders_are_cheap() -> None:
    count = 2**50 + 12345
    windows = ShuffleOrder(count, 7).permute(np.arange(10**15, 10**15 + 1000))
    assert len(set(windows.tolist())) == 1000
    assert windows.min() >= 0
    assert windows.max() < count


def test_the_order_looks_shuffled() -> None:
    count = 4096
    windows = ShuffleOrder(count, 3).permute(np.arange(count)).astype(float)
    # The correlation of neighbours in a random order is 0 +- 1/sqrt(n) = 0.016; five times that is never chance.
    assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 5 / np.sqrt(count)
    assert abs(np.corrcoef(windows, np.arange(count))[0, 1]) < 5 / np.sqrt(count)


# --- windows -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_set(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    """Documents of 1 to 40 tokens, counted up from 16, in several shards."""
    folder = tmp_path_factory.mktemp("set")
    with TokenSetWriter(str(folder), tokenizer, shard_tokens=150) as writer:
        for i in range(40):
            writer.add("train", [16 + (i + k) % 200 for k in range(1 + i)])
        writer.add("heldout", [20, 21])
        writer.commit({})
    return TokenSet.open(folder, "train")


def flat(token_set: TokenSet) -> list[np.ndarray]:
    return [np.fromfile(Path(token_set.url) / shard["file"], "<u2") for shard in token_set.shards]


@pytest.mark.parametrize("sequence", [1, 7, 16, 149])
def test_each_token_is_predicted_once_and_rows_never_cross_shards(token_set: TokenSet, sequence: int) -> None:
    assert len(token_set.shards) > 3
    layout = ConcatLayout(token_set, sequence + 1)
    assert layout.num_sequences == token_set.count_sequences(sequence)
    rows = [
        np.concatenate([token_set.tokens[piece.shard][piece.start : piece.stop] for piece in layout.spans(i)]).tolist()
        for i in range(layout.num_sequences)
    ]
    expected = []
    for shard in flat(token_set):
        count = (len(shard) - 1) // sequence
        expected += [shard[i * sequence : (i + 1) * sequence + 1].tolist() for i in range(count)]
    assert rows == expected
    for index in (len(rows), -1):
        with pytest.raises(IndexError):
            layout.spans(index)


@pytest.mark.parametrize("sequence", [5, 16])
def test_documents_of_a_row_begin_after_endoftext(token_set: TokenSet, tokenizer: Tokenizer, sequence: int) -> None:
    loader = TokenSetLoader(token_set, sequence=sequence, seed=1)
    rows = loader.read(range(loader.num_sequences))
    for row, starts in zip(rows.tokens, rows.starts, strict=True):
        assert list(starts) == (np.flatnonzero(row[:-1] == tokenizer.eot) + 1).tolist()
    numbers = document_numbers(rows)
    assert numbers.shape == (len(rows), sequence)
    ends = rows.tokens[:, :-1] == tokenizer.eot
    assert np.array_equal(numbers[:, 1:] - numbers[:, :-1], ends[:, :-1].astype(np.int32))


def test_a_token_set_reports_its_size_and_tokenizer(token_set: TokenSet, tokenizer: Tokenizer) -> None:
    assert token_set.vocab == tokenizer.vocab_size
    assert token_set.num_tokens == sum(len(shard) for shard in flat(token_set)) == 40 * 41 // 2 + 40
    assert token_set.num_documents == 40
    assert Tokenizer.load(token_set.tokenizer_path).sha256 == tokenizer.sha256


def test_large_vocabularies_use_uint32() -> None:
    assert [dtype_for(vocab) for vocab in (300, 65536, 65537)] == ["uint16", "uint16", "uint32"]


# --- the stream ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    micro=st.sampled_from([1, 2, 3]),
    resume=st.integers(0, 8),
)
def test_the_stream_does_not_depend_on_ranks_micro_batches_or_restarts(
    token_set: TokenSet, seed: int, ranks: int, micro: int, resume: int
) -> None:
    batch, steps = 12, 8
    whole = TokenSetLoader(token_set, sequence=16, seed=seed).read(range(batch * steps)).tokens
    got: list[np.ndarray] = []
    for first, last in ((0, resume), (resume, steps)):
        loader = TokenSetLoader(token_set, sequence=16, seed=seed)  # a restart: no state is kept
        for step in range(first, last):
            share = batch // ranks
            for rank in range(ranks):
                begin = step * batch + rank * share
                for at in range(0, share, micro):
                    count = min(micro, share - at)
                    got.append(loader.read(range(begin + at, begin + at + count)).tokens)
    assert np.array_equal(np.concatenate(got), whole)


def test_an_epoch_reads_each_window_once(token_set: TokenSet) -> None:
    loader = TokenSetLoader(token_set, sequence=16, seed=5)
    rows = loader.read(range(2 * loader.num_sequences))
    layout = ConcatLayout(token_set, 17)
    shown = loader._order.permute(np.arange(2 * loader.num_sequences)).tolist()
    for row, window in zip(rows.tokens, shown, strict=True):
        pieces = layout.spans(window)
        whole = token_set.tokens[pieces[0].shard][pieces[0].start : pieces[-1].stop]
        assert row.tolist() == whole.tolist()
    assert (
        sorted(shown[: loader.num_sequences])
        == sorted(shown[loader.num_sequences :])
        == list(range(loader.num_sequences))
    )


def test_a_split_shorter_than_a_sequence_is_rejected(token_set: TokenSet) -> None:
    heldout = TokenSet.open(token_set.url, "heldout")
    assert heldout.count_sequences(16) == 0
    with pytest.raises(UserError, match="shorter sequence"):
        TokenSetLoader(heldout, sequence=16, seed=0)
    with pytest.raises(UserError, match="choose one of: train, heldout"):
        TokenSet.open(token_set.url, "test")


def test_an_empty_split_opens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with TokenSetWriter(str(tmp_path), tokenizer) as writer:
        writer.add("train", [17, 18])
        writer.commit({})
    assert TokenSet.open(tmp_path, "heldout").count_sequences(4) == 0


GOLDEN_ORDER = [8, 9, 5, 3, 6, 1, 7, 0, 4, 2, 8, 4, 6, 3, 0, 7, 9, 5, 2, 1]
