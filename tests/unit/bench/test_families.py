"""lakh bench decode --families: one row for each architecture, of the same size."""

import pytest
import torch
from bench.decode import families

from lakh.spec.model import FAMILIES

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="int8 is a CPU's"), pytest.mark.slow]


def test_every_architecture_has_a_model_of_about_the_same_size() -> None:
    llama = families._read_weights(families.family_model("llama"))
    for name in FAMILIES:  # one that needs more than sizes raises: give it an entry in FAMILY_MODELS
        assert 0.65 < families._read_weights(families.family_model(name)) / llama < 1.05, name


def test_a_row_says_what_a_token_costs_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"layers": 1, "width": 64, "heads": 2, "kv_heads": 1, "ffn": 128, "vocab": 512}
    monkeypatch.setattr(families, "_SIZES", {**families._SIZES, **small})
    monkeypatch.setitem(families.FAMILY_MODELS, "starcoder2", {"gated": False})
    times = iter([families.Times(1.0, 1.0, 2.0, 1.4), families.Times(1.0, 1.0, 2.0, 1.8)])
    monkeypatch.setattr(families, "measure", lambda generate, new: next(times))
    llama, starcoder2 = families.bench_families(families=["llama", "starcoder2"], prompt=8, new=5, repeats=1)
    assert (llama["cpu_ms_per_token"], llama["ratio"], llama["prompt_cpu_ms"]) == (pytest.approx(100.0), 1.0, 1000.0)
    per_weight = starcoder2["cpu_ms_per_token"] * 1e6 / starcoder2["active"]
    assert starcoder2["ns_per_param"] == pytest.approx(per_weight)
    assert starcoder2["ratio"] == pytest.approx(2 * llama["active"] / starcoder2["active"])
