"""Reading ahead in a process of its own: the same batches, counted waits, and an end to everything."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lakh.errors import CorruptShard, PeerLost, PeerTimeout, UserError
from lakh.spec import Data
from lakh.tokens.ahead import Question, ReadAhead
from lakh.tokens.digest import StreamDigest, digest_rows
from lakh.tokens.loader import Stream, document_numbers
from lakh.tokens.packing import pack
from lakh.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(200)  # a hang is a failure


@pytest.fixture(scope="module")
def packed(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack(corpus, tokenizer, folder, heldout_fraction=0.1)
    return folder


def question(tokens: Path | str, *, last_step: int = 20, first_step: int = 0, **more: object) -> Question:
    data = Data(tokens=str(tokens), sequence=32, batch=4, micro_batch=1, **more)  # type: ignore[arg-type]
    return Question(data, 7, first_step, last_step, first_position=4 * first_step, offset=2, rows=2)


def take_all(ahead: ReadAhead, steps: range) -> None:
    for step in steps:
        ahead.take(step)


def test_batches_are_those_of_the_stream_with_documents_and_hash(packed: Path) -> None:
    asked = question(packed, prefetch=3, document_mask=True, packing="best-fit", fim_rate=0.5, first_step=5)
    stream, total = Stream.open(asked.data, asked.seed), StreamDigest()
    with ReadAhead(asked) as ahead:
        for step in range(5, 20):
            taken, rows = ahead.take(step), stream.rows(4 * step + 2, 2)
            assert np.array_equal(taken.tokens, rows.tokens)
            assert np.array_equal(taken.lengths, rows.lengths)
            assert taken.documents is not None
            assert np.array_equal(taken.documents, document_numbers(rows))
            assert taken.digest == digest_rows(4 * step + 2, rows.tokens, rows.lengths)
            total += taken.digest
    assert total.rows == 30


def test_it_reads_as_far_ahead_as_it_was_told_and_not_further(packed: Path) -> None:
    with ReadAhead(question(packed, last_step=1000, prefetch=5)) as ahead:
        ahead.take(0)
        deadline = time.monotonic() + 120
        while ahead.ready < 4 and time.monotonic() < deadline:
            ahead._listen(0.1)
        ahead._listen(0.3)  # were there no bound, more would come
        assert ahead.ready == 4
        waited = ahead.wait_s
        for step in range(1, 5):
            ahead.take(step)
        assert ahead.wait_s == waited  # what is there is not waited for
        assert ahead.starved == 0
        assert waited > 0


def test_batches_are_taken_strictly_in_order(packed: Path) -> None:
    with ReadAhead(question(packed, first_step=3, last_step=5)) as ahead:
        for wrong in (4, 5):
            with pytest.raises(IndexError):
                ahead.take(wrong)
        ahead.take(3)
        ahead.take(4)
        with pytest.raises(IndexError):
            ahead.take(5)


def test_an_error_of_the_reader_is_raised_here_in_its_own_words(packed: Path, tmp_path: Path) -> None:
    with ReadAhead(question(tmp_path / "nowhere")) as ahead, pytest.raises(UserError, match="lakh tokens pack"):
        ahead.take(0)
    broken = tmp_path / "broken"
    shutil.copytree(packed, broken)
    (broken / "train" / "tokens-00000.bin").unlink()
    with ReadAhead(question(broken)) as ahead, pytest.raises(CorruptShard, match=r"tokens-00000\.bin.*is missing"):
        ahead.take(0)


def test_a_reader_that_was_killed_is_a_lost_peer(packed: Path) -> None:
    with ReadAhead(question(packed, last_step=10**6, prefetch=2)) as ahead:
        ahead.take(0)
        os.kill(ahead._process.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="exit code -9"):
            take_all(ahead, range(1, 10))  # what is in the ring is still good


def test_a_reader_that_stands_still_is_given_up(packed: Path) -> None:
    with ReadAhead(question(packed, last_step=10**6, prefetch=2), timeout_s=0.5) as ahead:
        ahead.timeout_s = 120.0
        ahead.take(0)
        ahead.timeout_s = 0.5
        os.kill(ahead._process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(PeerTimeout, match=r"within 0\.5 s"):
                take_all(ahead, range(1, 10))
            assert ahead.starved == 1
        finally:
            os.kill(ahead._process.pid, signal.SIGCONT)


def test_signals_that_stop_a_trainer_leave_its_reader_working(packed: Path) -> None:
    with ReadAhead(question(packed, last_step=50, prefetch=2)) as ahead:
        ahead.take(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(ahead._process.pid, number)
        for step in range(1, 50):
            ahead.take(step)
    assert ahead._process.returncode == 0
