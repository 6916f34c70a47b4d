"""Every parallel layout gives the losses and gradient norms of one process, in float32."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lakh import config
from lakh.planner.execution_plan import plan_of_run
from lakh.planner.timing.expert_exchange import exchanged_bytes
from lakh.spec import Data, Mesh, Model, Run

PROGRAM = Path(__file__).with_name("parity_rank.py")
TIMEOUT_S = 240
SIZES = {"width": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 128, "context": 64}

# Sums of a few thousand float32 terms in another order: measured 1e-6 on losses near 5 and 3e-7 on norms near 1.
TOLERANCE = 2e-6


def case(
    mesh: dict[str, Any],
    *,
    packed: bool = False,
    model: dict | None = None,
    optim: str = "adamw",
    adapter: int = 0,
    then: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """`adapter`: rank of low-rank adapters, the only weights that are trained then. `then`: the mesh that the run
    resumes on, from a checkpoint after the first step."""
    settings = {**mesh, **train, **(model or {}), **({"adapter": adapter} if adapter else {})}
    settings |= {} if then is None else {"then": then}
    words = [f"{key}={value}" for key, value in settings.items()] or ["fsdp"]
    name = " ".join([*words, *(["packed"] if packed else []), *([optim] if optim != "adamw" else [])])
    shape = {"tied": False, **(model or {})}
    return {
        "name": name,
        "mesh": mesh,
        "then": then,
        "packed": packed,
        "model": shape,
        "optim": optim,
        "adapter": adapter,
        "train": train,
    }


def with_batch(ranks: int, of: dict[str, Any]) -> dict[str, Any]:
    """The case on a number of ranks: each has two micro-batches or more. Gradients of fewer than 4 sequences are so
    large that rounding exceeds the tolerance. Other blocks than the plain one have two layers, one of each kind, unless
    a pipeline divides them, and one step: the held-out loss after it shows its update."""
    meshes = [mesh for mesh in (of["mesh"], of["then"]) if mesh is not None]
    data_ranks = max(ranks // math.prod(mesh.get(axis, 1) for axis in ("tp", "cp", "pp")) for mesh in meshes)
    is_plain, has_pipeline = of["model"].keys() == {"tied"}, any("pp" in mesh for mesh in meshes)
    model = {"layers": 4 if is_plain or has_pipeline else 2, **of["model"]}
    must_repeat = has_pipeline or of["then"] is not None  # the first step of a pipeline sends more; a run resumes
    steps = 2 if must_repeat or (is_plain and ranks == 2) else 1
    return {**of, "model": model, "batch": max(4, 2 * data_ranks), "steps": steps}


INTERLEAVED, ZERO_BUBBLE = {"pp": 2, "pp_schedule": "interleaved"}, {"pp": 2, "pp_schedule": "zero_bubble"}

WINDOW = {"tokens": 9, "share": 0.5}
GEMMA2 = {"family": "gemma2", "sliding_window": WINDOW, "attention_softcap": 5.0, "logit_softcap": 4.0}
STARCODER2 = {"family": "starcoder2", "gated": False, "sliding_window": WINDOW}
GPT_BIGCODE = {"family": "gpt_bigcode", "gated": False, "kv_heads": 8}
SHARED_KEYS = {**GPT_BIGCODE, "kv_heads": 1, "exact_gelu": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
SEED_OSS = {"family": "seed_oss", "head_size": 12}
YARN = {"kind": "yarn", "factor": 4.0, "original_context": 8}
MINISTRAL3 = {"family": "ministral3", "rope_scaling": YARN, "query_growth": 0.3}
PHI3 = {"family": "phi3", "rotary_size": 4}
STABLELM = {"family": "stablelm", "rotary_size": 4}
STABLELM_2 = {**STABLELM, "attention_bias": True}
STABLELM_2_12B = {**STABLELM, "qk_norm": True, "parallel_residual": True}
GLM4 = {"family": "glm4", "rotary_size": 4, "attention_bias": True}
SMOLLM3 = {"family": "smollm3", "unrotated_interval": 2}
GRANITE = {"family": "granite", "embedding_scale": 3.0, "score_scale": 0.2, "residual_scale": 0.6, "logit_divisor": 2.0}
GEMMA3 = {"family": "gemma3", "qk_norm": True, "sliding_window": WINDOW, "local_rope_base": 50.0}
OLMO2 = {"family": "olmo2", "qk_norm": True}
OLMO3 = {
    "family": "olmo3",
    "qk_norm": True,
    "sliding_window": {"tokens": 9, "share": 0.75},
    "rope_scaling": YARN,
    "local_rope_base": 1e4,
}
MIXTRAL = {"experts": {"count": 4, "top_k": 2, "ffn": 48}}
BALANCED = {"count": 4, "top_k": 2, "ffn": 48, "shared": 1, "balance_loss": 0.05, "balance_bias": 0.01}
BALANCED_MIXTRAL = {"experts": BALANCED}
DENSE_FIRST = {"experts": {**BALANCED, "dense_layers": 1}}
GPT_OSS = {
    "family": "gpt_oss",
    "sliding_window": WINDOW,
    "experts": {"count": 4, "top_k": 2, "ffn": 48, "bias": True},
}
DEEPSEEK_V2 = {
    "family": "deepseek_v2",
    "kv_heads": 8,
    "latent": {"kv_rank": 16, "rope_dim": 4, "q_rank": 24},
    "experts": {"count": 4, "top_k": 2, "ffn": 48, "shared": 1, "dense_layers": 1, "normalize": False},
}
DEEPSEEK_V3 = {
    "family": "deepseek_v3",
    "kv_heads": 8,
    "latent": {"kv_rank": 16, "rope_dim": 4, "q_rank": 24},
    "experts": {
        **BALANCED,
        "count": 8,
        "dense_layers": 1,
        "groups": 4,
        "top_groups": 2,
        "weight_scale": 2.5,
    },
}
GLM4_MOE = {
    "family": "glm4_moe",
    "rotary_size": 4,
    "experts": {**BALANCED, "dense_layers": 1, "weight_scale": 2.5, "balance_loss": 0.0},
}
QWEN2_MOE = {
    "family": "qwen2_moe",
    "experts": {"count": 4, "top_k": 2, "ffn": 48, "shared": 2, "interval": 2, "normalize": False},
}
LLAMA4 = {
    "family": "llama4",
    "qk_norm": True,
    "unrotated_interval": 2,
    "experts": {"count": 4, "top_k": 1, "ffn": 48, "shared": 1, "interval": 2, "normalize": False},
}
CHUNKED_LLAMA4 = {
    **LLAMA4,
    "sliding_window": {"tokens": 7, "share": 0.5},
    "query_growth": 0.3,
    "growth_interval": 5,
}
MINIMAX_M2 = {
    "family": "minimax_m2",
    "qk_norm": True,
    "rotary_size": 4,
    "experts": {"count": 4, "top_k": 2, "ffn": 48, "balance_bias": 0.01},
}

DROPS = {"experts": {**BALANCED, "capacity": 0.75}}
ALL_EXPERTS = {"experts": {"count": 4, "top_k": 4, "ffn": 48}}
FEW_EXPERTS = {"experts": {"count": 2, "top_k": 1, "ffn": 48}}
EXPERTS = {"ep": 2}

TWO = [
    case({}),
    case({"dp_replicate": 2}),
    case({"tp": 2}),
    case({"cp": 2}),
    case({"pp": 2}),
    case({"pp": 2, "pp_schedule": "gpipe"}),
    case(INTERLEAVED),
    case(ZERO_BUBBLE),
    case({"tp": 2}, model={"tied": True}),
    case({"tp": 2}, model={"qk_norm": True}),
    case({"tp": 2}, packed=True),
    case({"cp": 2}, packed=True),
    case({"pp": 2}, packed=True),
    case({}, recompute="selective"),
    case({}, recompute="full"),
    case({"tp": 2}, z_loss=1e-3, label_smoothing=0.1),
    case({}, optim="muon"),
    case({"dp_replicate": 2}, optim="muon"),
    case({"tp": 2}, optim="muon"),
    case({"tp": 2}, packed=True, model=GEMMA2),
    case({"cp": 2}, packed=True, model=GEMMA2),
    case({"tp": 2}, packed=True, model=BIASES),
    case({"tp": 2}, packed=True, model=SEED_OSS),
    case({"tp": 2}, packed=True, model=PHI3),
    case({"cp": 2}, packed=True, model=SMOLLM3),
    case({"cp": 2}, packed=True, model=MINISTRAL3),
    case({"pp": 2}, model=SMOLLM3),
    case({"tp": 2}, model=GRANITE),
    case({"cp": 2}, packed=True, model=GRANITE),
    case({"tp": 2}, packed=True, model=GEMMA3),
    case({"cp": 2}, packed=True, model=GEMMA3),
    case({"tp": 2}, packed=True, model=OLMO2),
    case({"cp": 2}, packed=True, model=OLMO3),
    case({"tp": 2}, model=STARCODER2),
    case({"pp": 2}, model=STARCODER2),
    case({"tp": 2}, packed=True, model=STABLELM_2),
    case({"tp": 2}, model=STABLELM_2_12B),
    case({"tp": 2}, packed=True, model=GLM4),
    case({"cp": 2}, packed=True, model=STABLELM),
    case({"tp": 2}, packed=True, model=GPT_BIGCODE),
    case({"pp": 2}, model=GPT_BIGCODE),
    case({"tp": 2}, model=GPT_BIGCODE, then={"dp_replicate": 2}),
    case({"tp": 2}, model={**GPT_BIGCODE, "tied": True}),
    case({"cp": 2}, packed=True, model=SHARED_KEYS),
    case({}, model=SHARED_KEYS),
    case({}, model=MIXTRAL),
    case({"tp": 2}, model=MIXTRAL),
    case({"pp": 2}, model=MIXTRAL),
    case({}, model=BALANCED_MIXTRAL),
    case({"dp_replicate": 2}, model=BALANCED_MIXTRAL),
    case({"tp": 2}, model=DENSE_FIRST),
    case({"cp": 2}, model=DENSE_FIRST),
    case({"pp": 2}, model=DENSE_FIRST),
    case({}, model=BALANCED_MIXTRAL, recompute="full"),
    case({"tp": 2}, model=GPT_OSS),
    case({"cp": 2}, packed=True, model=GPT_OSS),
    case({"tp": 2}, model=DEEPSEEK_V2),
    case({"cp": 2}, packed=True, model=DEEPSEEK_V2),
    case({"pp": 2}, model=DEEPSEEK_V2),
    case({"tp": 2}, model=DEEPSEEK_V3),
    case({"cp": 2}, packed=True, model=DEEPSEEK_V3),
    case({"pp": 2}, model=DEEPSEEK_V3),
    case({"tp": 2}, packed=True, model=GLM4_MOE),
    case({"cp": 2}, packed=True, model={**GLM4_MOE, "qk_norm": True}),
    case({"tp": 2}, packed=True, model=QWEN2_MOE),
    case({"cp": 2}, packed=True, model=QWEN2_MOE),
    case({"tp": 2}, packed=True, model=LLAMA4),
    case({"cp": 2}, packed=True, model=LLAMA4),
    case({"cp": 2}, packed=True, model=CHUNKED_LLAMA4),
    case({"cp": 2}, model=CHUNKED_LLAMA4),
    case({"tp": 2}, packed=True, model=MINIMAX_M2),
    case({"cp": 2}, packed=True, model=MINIMAX_M2),
    case({}, adapter=4),
    case({"dp_replicate": 2}, adapter=4),
    case({"cp": 2}, packed=True, adapter=4),
    case(EXPERTS, model=MIXTRAL),
    case(EXPERTS, model=BALANCED_MIXTRAL),
    case(EXPERTS, model=DROPS),
    case({}, model=DROPS),
    case({"tp": 2}, model=DROPS),
    case(EXPERTS, model=DENSE_FIRST, recompute="full"),
    case(EXPERTS, packed=True, model=GPT_OSS),
    case(EXPERTS, model=DEEPSEEK_V2),
    case(EXPERTS, model=DEEPSEEK_V3),
    case(EXPERTS, model=GLM4_MOE),
    case(EXPERTS, model=QWEN2_MOE),
    case(EXPERTS, model=LLAMA4),
    case(EXPERTS, model=MINIMAX_M2, then={"tp": 2}),
    case({"cp": 2, **EXPERTS}, model=DENSE_FIRST),
    case(EXPERTS, model=MIXTRAL, adapter=4),
    case(EXPERTS, model=BALANCED_MIXTRAL, then={}),
    case({"tp": 2}, model=BALANCED_MIXTRAL, then=EXPERTS),
    case(EXPERTS, model=ALL_EXPERTS),
]
FOUR = [
    case({}),
    case({"dp_replicate": 2}),
    case({"tp": 2}),
    case({"tp": 4}),
    case({"cp": 2}),
    case({"cp": 4}),
    case({"cp": 2, "tp": 2}),
    case({"pp": 2}),
    case(INTERLEAVED),
    case({"pp": 2, "tp": 2}),
    case({"pp": 2, "cp": 2}),
    case({"dp_replicate": 2, **INTERLEAVED}),
    case({"pp": 4}),
    case({"cp": 2, "tp": 2, "order": ["tp", "pp", "cp", "dp_shard", "dp_replicate"]}),
    case({"dp_replicate": 2, "tp": 2}, recompute="full"),
    case({"cp": 2}, packed=True, recompute="selective"),
    case({}, optim="muon"),
    case({"dp_replicate": 2}, optim="muon"),
    case({"tp": 2}, optim="muon"),
    case({"cp": 2, "tp": 2}, model=DENSE_FIRST),
    case({"cp": 2, "tp": 2}, packed=True, model=GPT_BIGCODE),
    case(EXPERTS, model=BALANCED_MIXTRAL),
    case({"ep": 4}, model=DROPS),
    case({"dp_replicate": 2, **EXPERTS}, model=BALANCED_MIXTRAL),
    case({"tp": 2, **EXPERTS}, model=DENSE_FIRST),
    case({"pp": 2, **EXPERTS}, model=BALANCED_MIXTRAL),
    case(EXPERTS, model=FEW_EXPERTS, optim="muon"),
    case(EXPERTS, model=FEW_EXPERTS, then={"ep": 2, "tp": 2}),
    case({"ep": 4}, model=BALANCED_MIXTRAL, then={"dp_replicate": 2}),
]
TWO, FOUR = [with_batch(2, of) for of in TWO], [with_batch(4, of) for of in FOUR]
REFUSED = [
    (case(ZERO_BUBBLE), 4, "wrong gradients without an error"),
    (case({"pp": 2}, model={"tied": True}), 2, "model.tied makes them one matrix"),
    (case({"pp": 4, "pp_schedule": "interleaved"}), 4, "8 stages .* do not divide model.layers 4"),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory):
    """The cases of one number of ranks and backend, run together once."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, str(PROGRAM)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    results: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}

    def get(ranks: int, backend: str) -> dict[str, dict[str, Any]]:
        key = (ranks, backend)
        if key not in results:
            refused = [with_batch(ranks, case) for case, on, _ in REFUSED if on == ranks]
            cases = {1: list(WHOLE.values()), 2: [*TWO, *refused], 4: [*FOUR, *refused]}[ranks]
            folder = str(tmp_path_factory.mktemp(f"{backend}{ranks}"))
            question = {"ranks": ranks, "backend": backend, "cases": cases, "folder": folder, "timeout_s": TIMEOUT_S}
            assert parent.stdin is not None
            assert parent.stdout is not None
            parent.stdin.write(json.dumps(question) + "\n")
            parent.stdin.flush()
            results[key] = json.loads(parent.stdout.readline())
        assert "failed" not in results[key], results[key]["failed"]
        return results[key]

    yield get
    parent.kill()
    parent.wait()


def whole(of: dict[str, Any]) -> str:
    """The name of the same training on one process: layout and recomputation do not change the result."""
    plain = {
        **of,
        "mesh": {},
        "then": None,
        "train": {key: value for key, value in of["train"].items() if key != "recompute"},
    }
    name = json.dumps({key: plain[key] for key in ("batch", "packed", "model", "optim", "adapter", "train")})
    reference = WHOLE.setdefault(name, {**plain, "name": name})
    reference["steps"] = max(reference["steps"], of["steps"])
    return name


WHOLE: dict[str, dict[str, Any]] = {}
REFERENCE = {(ranks, of["name"]): whole(of) for ranks, cases in ((2, TWO), (4, FOUR)) for of in cases}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "c3"])
@pytest.mark.parametrize(
    ("ranks", "name"), [(2, c["name"]) for c in TWO] + [(4, c["name"]) for c in FOUR], ids=lambda value: str(value)
)
def test_losses_and_gradient_norms_are_those_of_one_process(ranks: int, name: str, backend: str, played) -> None:
    one, many = played(1, "gloo")[REFERENCE[ranks, name]], played(ranks, backend)[name]
    steps = len(many["losses"])
    assert many["losses"] == pytest.approx(one["losses"][:steps], abs=TOLERANCE)
    assert many["norms"] == pytest.approx(one["norms"][:steps], abs=TOLERANCE)
    assert many["heldout"] == pytest.approx([one["heldout"][steps - 1]], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_keep_their_traffic_inside_the_node(played) -> None:
    """Counted, not computed: 4 ranks, two to a node, two micro-batches on each, float32."""
    weights_bytes = 4 * Model(**SIZES, layers=4, tied=False).parameters
    shards, copies = played(4, "gloo")["fsdp"]["sent"], played(4, "gloo")["dp_replicate=2"]["sent"]
    assert shards["zone reduce_scatter"] == weights_bytes * 3 // 4
    assert copies["node reduce_scatter"] == weights_bytes // 2
    between_nodes = [sum(count for kind, count in sent.items() if kind.startswith("zone")) for sent in (shards, copies)]
    assert between_nodes[1] < 0.15 * between_nodes[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pipeline_traffic_is_counted_on_every_backend(played) -> None:
    """Two micro-batches of 64 x 64 float32 values to the next stage, which rank 0 is before."""
    for backend in ("gloo", "c3"):
        assert played(4, backend)["pp=2"]["sent"]["zone send"] == 2 * 64 * 64 * 4, backend


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gloo", "c3"])
def test_the_planner_predicts_the_bytes_of_expert_parallelism(played, backend: str) -> None:
    """Exactly, where every token goes to every expert; with a router, up to its unevenness."""
    for model, tolerance in ((ALL_EXPERTS, 0.0), (MIXTRAL, 0.1)):
        asked = with_batch(2, case(EXPERTS, model=model))
        spec = config.from_dict(Model, {**SIZES, **asked["model"]}, origin="case")
        run = Run(
            name="parity", model=spec, mesh=Mesh(**EXPERTS), data=Data(sequence=64, batch=asked["batch"], micro_batch=1)
        )
        predicted = exchanged_bytes(run.model, plan_of_run(run, 2), value_bytes=4.0)
        assert played(2, backend)[asked["name"]]["sent"]["node alltoall"] == pytest.approx(predicted, rel=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("refused", "ranks", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_layouts_are_rejected_with_the_reason(refused: dict, ranks: int, words: str, played) -> None:
    assert re.search(words, played(ranks, "gloo")[refused["name"]]["refused"])


def test_the_reference_depends_on_masks_and_losses(played) -> None:
    """Masks, z-loss and label smoothing change the loss of one process, so the comparison covers them."""
    names = ("tp=2", "tp=2 packed", "tp=2 z_loss=0.001 label_smoothing=0.1")
    plain, packed, asked = (played(1, "gloo")[REFERENCE[2, name]]["losses"] for name in names)
    assert packed != pytest.approx(plain, abs=1e-4)
    assert asked != pytest.approx(plain, abs=1e-4)
    kept, dropped = (
        played(1, "gloo")[REFERENCE[2, case(EXPERTS, model=model)["name"]]]["losses"]
        for model in (BALANCED_MIXTRAL, DROPS)
    )
    assert dropped[0] != pytest.approx(kept[0], abs=1e-4)
