"""Prefetching in a child process: the same batches, counted waits, clear errors."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lakh.errors import CorruptShard, PeerLost, PeerTimeout, UserError
from lakh.spec import Data
from lakh.tokens.dataset.packing import pack
from lakh.tokens.loading import prefetch
from lakh.tokens.loading.digest import StreamDigest, digest_sequences
from lakh.tokens.loading.prefetch import BatchRequest, Prefetcher, prepare_reader
from lakh.tokens.loading.stream import TokenStream, document_numbers
from lakh.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(200)  # a hang is a failure


@pytest.fixture(scope="module")
def packed(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack(corpus, tokenizer, folder, heldout_fraction=0.1)
    return folder


def request(tokens: Path | str, *, last_step: int = 20, first_step: int = 0, **more: object) -> BatchRequest:
    data = Data(tokens=str(tokens), sequence=32, batch=4, micro_batch=1, **more)  # type: ignore[arg-type]
    return BatchRequest(data, 7, first_step, last_step, first_position=4 * first_step, offset=2, num_sequences=2)


def take_all(prefetcher: Prefetcher, steps: range) -> None:
    for step in steps:
        prefetcher.take(step)


def test_batches_are_those_of_the_stream_with_documents_and_hash(packed: Path) -> None:
    asked = request(packed, prefetch=3, document_mask=True, packing="best-fit", fim_rate=0.5, first_step=5)
    stream, total = TokenStream(asked.data, asked.seed), StreamDigest()
    with closing(Prefetcher(asked)) as prefetcher:
        for step in range(5, 20):
            taken, rows = prefetcher.take(step), stream.read_range(4 * step + 2, 2)
            assert np.array_equal(taken.tokens, rows.tokens)
            assert np.array_equal(taken.lengths, rows.lengths)
            assert taken.documents is not None
            assert np.array_equal(taken.documents, document_numbers(rows))
            assert taken.digest == digest_sequences(4 * step + 2, rows.tokens, rows.lengths)
            total += taken.digest
    assert total.sequences == 30


def test_it_prefetches_up_to_the_limit(packed: Path) -> None:
    with closing(Prefetcher(request(packed, last_step=1000, prefetch=5))) as prefetcher:
        prefetcher.take(0)
        deadline = time.monotonic() + 120
        while prefetcher.ready < 4 and time.monotonic() < deadline:
            prefetcher._update_ready(0.1)
        prefetcher._update_ready(0.3)  # were there no bound, more would come
        assert prefetcher.ready == 4
        waited = prefetcher.wait_s
        for step in range(1, 5):
            prefetcher.take(step)
        assert prefetcher.wait_s == waited  # what is there is not waited for
        assert prefetcher.starved == 0
        assert waited > 0


def test_batches_are_taken_strictly_in_order(packed: Path) -> None:
    with closing(Prefetcher(request(packed, first_step=3, last_step=5))) as prefetcher:
        for wrong in (4, 5):
            with pytest.raises(IndexError):
                prefetcher.take(wrong)
        prefetcher.take(3)
        prefetcher.take(4)
        with pytest.raises(IndexError):
            prefetcher.take(5)


def test_errors_of_the_child_are_raised_in_the_trainer(packed: Path, tmp_path: Path) -> None:
    with (
        closing(Prefetcher(request(tmp_path / "nowhere"))) as prefetcher,
        pytest.raises(UserError, match="lakh tokens pack"),
    ):
        prefetcher.take(0)
    broken = tmp_path / "broken"
    shutil.copytree(packed, broken)
    (broken / "train" / "tokens-00000.bin").unlink()
    with (
        closing(Prefetcher(request(broken))) as prefetcher,
        pytest.raises(CorruptShard, match=r"tokens-00000\.bin.*is missing"),
    ):
        prefetcher.take(0)


def test_a_kept_child_serves_the_next_request(packed: Path) -> None:
    first = Prefetcher(request(packed, last_step=10, prefetch=2))
    expected = [first.take(step).tokens.copy() for step in range(3)]
    child = first._child
    first.close(keep=True)
    with closing(Prefetcher(request(packed, last_step=10, prefetch=4))) as second:
        assert second._child is child
        for step, tokens in enumerate(expected):
            assert (second.take(step).tokens == tokens).all()
    assert child.exit_code == 0


def test_a_kept_child_that_died_is_replaced(packed: Path) -> None:
    first = Prefetcher(request(packed, last_step=10, prefetch=2))
    first.close(keep=True)
    first._child.kill()
    with closing(Prefetcher(request(packed, last_step=10, prefetch=2))) as second:
        assert second._child is not first._child
        second.take(0)


def test_a_child_that_was_prepared_takes_the_first_request(packed: Path) -> None:
    prepare_reader()
    prepared = prefetch._Reader.idle[0].child
    with closing(Prefetcher(request(packed, last_step=10, prefetch=2))) as prefetcher:
        assert prefetcher._child is prepared
        prefetcher.take(0)


def test_a_killed_child_raises_peer_lost(packed: Path) -> None:
    with closing(Prefetcher(request(packed, last_step=10**6, prefetch=2))) as prefetcher:
        prefetcher.take(0)
        os.kill(prefetcher._child.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="killed by SIGKILL"):
            take_all(prefetcher, range(1, 10))  # what is in the ring is still good


def test_a_hanging_child_raises_peer_timeout(packed: Path) -> None:
    with closing(Prefetcher(request(packed, last_step=10**6, prefetch=2), timeout_s=0.5)) as prefetcher:
        prefetcher.timeout_s = 120.0
        prefetcher.take(0)
        prefetcher.timeout_s = 0.5
        os.kill(prefetcher._child.pid, signal.SIGSTOP)
        try:
            with pytest.raises(PeerTimeout, match=r"within 0\.5 s"):
                take_all(prefetcher, range(1, 10))
            assert prefetcher.starved == 1
        finally:
            os.kill(prefetcher._child.pid, signal.SIGCONT)


def test_the_child_ignores_signals_that_stop_the_trainer(packed: Path) -> None:
    with closing(Prefetcher(request(packed, last_step=50, prefetch=2))) as prefetcher:
        prefetcher.take(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(prefetcher._child.pid, number)
        for step in range(1, 50):
            prefetcher.take(step)
    assert prefetcher._child.exit_code == 0
