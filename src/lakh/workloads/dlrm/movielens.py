"""MovieLens-100k as clicks: a rating of 4 or 5 is a click. Independent of torch.

Reads the files of RecBole's example data, from its wheel or from a folder. GroupLens does not allow redistribution, so
lakh does not contain the data: `pip download --no-deps recbole==1.2.1` fetches the wheel.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lakh.errors import UserError
from lakh.workloads.dlrm.click_set import ClickSamples

__all__ = ["FEATURES", "MovieLens"]

FEATURES = ("user", "item", "gender", "occupation", "genre")
FOLDER = "recbole/dataset_example/ml-100k"
CLICK_RATING = 4.0


class MovieLens:
    """All ratings in the order of time."""

    dense_features = 2

    def __init__(self, source: str | Path, features: Sequence[str] = FEATURES) -> None:
        if unknown := sorted(set(features) - set(FEATURES)):
            raise UserError(f"table {unknown[0]}", "is no feature of MovieLens", f"choose from {', '.join(FEATURES)}")
        hashed = hashlib.sha256()
        users_S, items_S, ratings_S, times_S = _columns(
            source, "inter", ("user_id", "item_id", "rating", "timestamp"), hashed
        )
        order = np.lexsort((items_S, users_S, times_S.astype(np.float64)))
        users, ages, genders, occupations = _columns(source, "user", ("user_id", "age", "gender", "occupation"), hashed)
        items, years, genres = _columns(source, "item", ("item_id", "release_year", "class"), hashed)
        user_S, item_S = _positions(users, users_S[order], source), _positions(items, items_S[order], source)
        bags = {
            "user": _single(users_S[order]),
            "item": _single(items_S[order]),
            "gender": _single(genders[user_S]),
            "occupation": _single(occupations[user_S]),
            "genre": _multiple(genres, item_S),
        }
        self._bags = [bags[name] for name in features]
        is_year = np.char.isdigit(years)
        year = np.where(is_year, np.where(is_year, years, "1980").astype(np.float32), 1980)
        dense = np.stack([ages.astype(np.float32)[user_S] / 50 - 1, (year[item_S] - 1980) / 20], axis=1)
        self._dense_SN = dense.astype(np.float32)
        self._labels_S = (ratings_S[order].astype(np.float32) >= CLICK_RATING).astype(np.float32)
        self.fingerprint = hashed.hexdigest()
        self.num_samples = len(order)
        self.rows = [rows for _, _, rows in self._bags]
        self.max_lengths = [int(np.diff(offsets).max()) for _, offsets, _ in self._bags]

    def read(self, numbers: np.ndarray) -> ClickSamples:
        ids, lengths = [], []
        for all_ids, offsets, _ in self._bags:
            count = offsets[numbers + 1] - offsets[numbers]
            ends = count.cumsum()
            positions = np.repeat(offsets[numbers] - ends + count, count) + np.arange(ends[-1] if len(ends) else 0)
            ids.append(all_ids[positions])
            lengths.append(count)
        return ClickSamples(
            np.concatenate(ids).astype(np.int32),
            np.stack(lengths).astype(np.int32),
            self._dense_SN[numbers],
            self._labels_S[numbers],
        )


Bags = tuple[np.ndarray, np.ndarray, int]
"""(ids of all samples, where each sample's begin, number of different ids)"""


def _single(values_S: np.ndarray) -> Bags:
    names, ids = np.unique(values_S, return_inverse=True)
    return ids, np.arange(len(ids) + 1), len(names)


def _multiple(texts: np.ndarray, text_S: np.ndarray) -> Bags:
    """Bags of the words of a text, for samples that name a text each."""
    words = [text.split() for text in texts.tolist()]
    names = sorted({word for bag in words for word in bag})
    number = {name: i for i, name in enumerate(names)}
    bags = [np.array([number[word] for word in bag], np.int64) for bag in words]
    per_sample = [bags[text] for text in text_S.tolist()]
    offsets = np.zeros(len(text_S) + 1, np.int64)
    np.cumsum([len(bag) for bag in per_sample], out=offsets[1:])
    return np.concatenate(per_sample), offsets, len(names)


def _positions(keys: np.ndarray, wanted: np.ndarray, source: str | Path) -> np.ndarray:
    order = np.argsort(keys)
    found = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    if not np.array_equal(keys[found], wanted):
        raise UserError(str(source), "has ratings of users or items that it does not describe", "fetch the data again")
    return found


def _columns(source: str | Path, kind: str, wanted: Iterable[str], hashed: hashlib._Hash) -> list[np.ndarray]:
    """Columns of one of RecBole's files: a header of name:type, then rows, separated by tabs."""
    name = f"ml-100k.{kind}"
    todo = "give the wheel of recbole (pip download --no-deps recbole==1.2.1), or a folder with its ml-100k files"
    try:
        if Path(source).is_dir():
            raw = (Path(source) / name).read_bytes()
        else:
            with zipfile.ZipFile(source) as wheel:
                raw = wheel.read(f"{FOLDER}/{name}")
        hashed.update(raw)
        header, *lines = raw.decode("utf-8").splitlines()
        places = [[field.partition(":")[0] for field in header.split("\t")].index(column) for column in wanted]
        rows = [line.split("\t") for line in lines if line]
        return [np.array([row[place] for row in rows]) for place in places]
    except (OSError, KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise UserError(str(source), f"has no readable {name} ({error})", todo) from None
