from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.dedup.components import components, directed, large_star, small_star
from lakh.corpus.dedup.minhash import MAX_BANDS, MAX_MINHASHES, SKETCH, BandShape, fit_bands
from lakh.corpus.dedup.near import MAX_PAIRED, NearDedupSettings, band_rows, candidate_pairs, jaccard, verify_pairs
from lakh.corpus.parsing.text_features import text_features
from lakh.errors import ConfigError

WORDS = [f"name{i}" for i in range(4000)]


def text_of(words: list[str]) -> str:
    return " ".join(words)


def shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def true_jaccard(left: list[str], right: list[str]) -> float:
    a, b = shingles(left), shingles(right)
    return len(a & b) / len(a | b)


def find(texts: dict[str, list[str]], threshold: float = 0.8) -> set[tuple[str, str]]:
    settings = NearDedupSettings(threshold=threshold)
    known = {node: text_features(text_of(words), "text", settings) for node, words in texts.items()}
    bands = pa.array([fact.bands for fact in known.values()], pa.binary())
    made = candidate_pairs(band_rows(pa.table({"node": list(known), "bands": bands})))
    a, b = made["a"].to_pylist(), made["b"].to_pylist()
    sketches = {"sketch_a": [known[x].sketch for x in a], "sketch_b": [known[x].sketch for x in b]}
    found = verify_pairs(pa.table({"a": a, "b": b, **sketches}), settings)
    return set(zip(found["a"].to_pylist(), found["b"].to_pylist(), strict=True))


@given(st.integers(0, 10**6), st.integers(20, 900))
def test_similarity_of_short_texts_is_exact(seed: int, size: int) -> None:
    rng = random.Random(seed)
    left = rng.sample(WORDS, size)
    right = list(left)
    for _ in range(size // 20):
        right[rng.randrange(size)] = rng.choice(WORDS)
    a, b = text_features(text_of(left), "text"), text_features(text_of(right), "text")
    # 32-bit shingle hashes: two of a thousand are equal once in ten thousand texts
    assert jaccard(a.sketch, b.sketch) == pytest.approx(true_jaccard(left, right), abs=2e-3)


@pytest.mark.slow
def test_similarity_of_long_texts_is_an_estimate_within_its_error() -> None:
    rng = random.Random(5)
    for _ in range(20):
        left = [rng.choice(WORDS) for _ in range(20_000)]
        right = list(left)
        for _ in range(700):
            right[rng.randrange(len(right))] = rng.choice(WORDS)
        a, b = text_features(text_of(left), "text"), text_features(text_of(right), "text")
        assert len(a.sketch) == 4 * SKETCH
        # five standard errors of sqrt(0.72 * 0.28 / 1024) = 0.014
        assert jaccard(a.sketch, b.sketch) == pytest.approx(true_jaccard(left, right), abs=0.07)


def test_almost_all_near_copies_are_found_and_nothing_else() -> None:
    rng = random.Random(11)
    texts, truth = {}, {}
    for number in range(150):
        left = [rng.choice(WORDS) for _ in range(rng.randint(60, 1500))]
        right = list(left)
        for _ in range(max(1, round(len(right) * rng.uniform(0, 0.03)))):
            right[rng.randrange(len(right))] = rng.choice(WORDS)
        texts[f"{number:04}a"], texts[f"{number:04}b"] = left, right
        truth[f"{number:04}a", f"{number:04}b"] = true_jaccard(left, right)
    found = find(texts)
    alike = {pair for pair, value in truth.items() if value >= 0.85}
    assert len(alike) > 50
    assert len(found & alike) >= 0.95 * len(alike)
    assert all(
        truth[pair] >= 0.8 - 0.05 for pair in found
    )  # KeyError: two texts that have nothing to do with each other


def test_threshold_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"threshold: 1\.5"):
        NearDedupSettings(threshold=1.5)


def test_crowded_key_gives_linear_pairs_that_join_all_nodes() -> None:
    nodes = [f"{i:05}" for i in range(3000)]
    made = candidate_pairs(pa.table({"key": pa.array(np.zeros(len(nodes), np.int64)), "node": nodes}))
    assert made.num_rows < 10 * len(nodes)
    assert set(components(made)["root"].to_pylist()) == {"00000"}


def test_key_with_few_nodes_pairs_all_of_them_once() -> None:
    nodes = [f"{i:02}" for i in range(MAX_PAIRED)] * 2  # two bands in common
    keys = np.repeat(np.array([1, 2]), MAX_PAIRED)
    assert candidate_pairs(pa.table({"key": keys, "node": nodes})).num_rows == MAX_PAIRED * (MAX_PAIRED - 1) // 2


def test_no_rows_give_no_pairs_and_no_components() -> None:
    empty = pa.table({"node": pa.array([], pa.string()), "bands": pa.array([], pa.binary())})
    assert components(candidate_pairs(band_rows(empty))).num_rows == 0


EDGES = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)).filter(lambda edge: edge[0] != edge[1]), max_size=40)


def stars(edges: pa.Table, split) -> pa.Table:
    """Rounds of large and small star, each over rows split by key as an engine would."""
    for _ in range(30):
        large = split(directed(edges, both=True), large_star)
        small = split(directed(large, both=False), small_star)
        if small.equals(edges):
            return small
        edges = small
    raise AssertionError("does not settle")


@pytest.mark.slow
@given(EDGES, st.integers(1, 4))
def test_rounds_over_split_rows_give_the_components_of_one_machine(edges: list[tuple[int, int]], buckets: int) -> None:
    table = pa.table(
        {
            "a": pa.array([f"{min(e):02}" for e in edges], pa.string()),
            "b": pa.array([f"{max(e):02}" for e in edges], pa.string()),
        }
    )

    def split(rows: pa.Table, step) -> pa.Table:
        owner = np.array([int(key) % buckets for key in rows["key"].to_pylist()], np.int64)
        made = pa.concat_tables([step(rows.filter(pa.array(owner == bucket))) for bucket in range(buckets)])
        return pa.Table.from_pylist(
            [dict(t) for t in sorted({tuple(sorted(row.items())) for row in made.to_pylist()})], schema=made.schema
        )

    settled = stars(table, split)
    distributed = dict(zip(settled["a"].to_pylist(), settled["b"].to_pylist(), strict=True))
    alone = components(table)
    expected = dict(zip(alone["node"].to_pylist(), alone["root"].to_pylist(), strict=True))
    assert distributed == {node: root for node, root in expected.items() if node != root}


@pytest.mark.parametrize("threshold", [0.5, 0.55, 0.6, 0.7, 0.79, 0.8, 0.9, 0.99, 1.0])
def test_bands_fit_the_threshold(threshold: float) -> None:
    shape = fit_bands(threshold)
    assert shape.recall(threshold) >= 0.94
    assert shape.bands <= MAX_BANDS
    assert shape.bands * shape.rows <= MAX_MINHASHES
    assert shape.recall(threshold / 2) < 0.2  # few pairs are compared in vain


def test_bands_of_the_usual_threshold() -> None:
    assert fit_bands(0.8) == BandShape(16, 8)


def test_lower_threshold_finds_pairs_that_share_no_band_of_the_usual_one() -> None:
    rng = random.Random(3)
    texts, similarities = {}, []
    for number in range(60):
        left = rng.sample(WORDS, 300)
        right = list(left)
        for at in rng.sample(range(300), 16):
            right[at] = f"other{number}_{at}"
        texts[f"{number:03}a"], texts[f"{number:03}b"] = left, right
        similarities.append(true_jaccard(left, right))
    assert all(0.5 < similarity < 0.75 for similarity in similarities)
    assert not find(texts, 0.8)
    assert len(find(texts, 0.5)) >= 57


PROGRAM = """
def {merge}({left}, {right}):
    {result}, {i}, {j} = [], 0, 0
    while {i} < len({left}) and {j} < len({right}):
        if {left}[{i}] <= {right}[{j}]:
            {result}.append({left}[{i}])
            {i} += 1
        else:
            {result}.append({right}[{j}])
            {j} += 1
    return {result} + {left}[{i}:] + {right}[{j}:]
"""


def test_names_are_ignored_where_the_setting_says_so() -> None:
    names = ["merge", "left", "right", "result", "i", "j"]
    text = PROGRAM.format(**dict(zip(names, names, strict=True)))
    renamed = PROGRAM.format(**dict(zip(names, ["join", "xs", "ys", "out", "a", "b"], strict=True)))
    swapped = text.replace("left[i] <= right[j]", "left[i] <= right[i]")
    ignoring, usual = NearDedupSettings(ignore_names=True), NearDedupSettings()

    def similarity(other: str, settings: NearDedupSettings) -> float:
        return jaccard(*(text_features(one, "python", settings).sketch for one in (text, other)))

    assert similarity(renamed, usual) < 0.2
    assert similarity(renamed, ignoring) == 1
    assert 0.5 < similarity(swapped, ignoring) < 1  # another use of the same names is another program


def test_short_texts_without_names_are_no_copies() -> None:
    settings = NearDedupSettings(ignore_names=True)
    assert text_features("import a, b, c, d, e, f, g\n", "python", settings).bands == b""
