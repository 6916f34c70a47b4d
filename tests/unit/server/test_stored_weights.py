"""A quantized GGUF file is served with the integers that it stores: the numbers of the file in little memory."""

from pathlib import Path

import pytest
import torch
from bench.decode.format_quality import bits_per_byte
from bench.decode.speed import tokenizer_json

from lakh.errors import UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import weights as model_weights
from lakh.server.model.cpu import native
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import gguf
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = [
    pytest.mark.skipif(native.open_library() is None, reason="the native engine library is not built"),
    pytest.mark.timeout(200),
    pytest.mark.slow,
]
CPU = torch.device("cpu")


def write(folder: Path, form: str, width: int = 256) -> Path:
    spec = Model(layers=3, width=width, heads=4, kv_heads=2, ffn=256, vocab=512, context=128, tied=True)
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {name: tensor.detach() * (4 if tensor.dim() > 1 else 1) for name, tensor in model.state_dict().items()}
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer_json(spec.vocab))
    gguf.save(folder / "model.gguf", "small", spec, weights, tokenizer, quantization=form)
    return folder / "model.gguf"


@pytest.mark.parametrize(("form", "width"), [("q4_k_m", 256), ("q5_k_m", 256), ("q4_k_m", 320), ("q8_0", 96)])
def test_logits_are_those_of_the_dequantized_file(form: str, width: int, tmp_path: Path) -> None:
    loaded = model_weights.read(write(tmp_path, form, width))
    networks = [InferenceModel(loaded.spec, loaded.weights, 512, CPU, name) for name in ("stored", "f32")]  # type: ignore[arg-type]
    stored, exact = networks
    assert stored.weight_bytes < 0.45 * exact.weight_bytes
    assert len(stored.embed) == 0, "no float32 copy of the embedding"
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for count in (40, 5):
        chunk = SequenceChunk(ids[:count], 0, [3, 1, 5], count)
        caches = [PagedCache(loaded.spec, 8, device=CPU, dtype=torch.float32) for _ in networks]
        ours, theirs = (one.forward([chunk], cache) for one, cache in zip(networks, caches, strict=True))
        assert (ours - theirs).norm() < 0.04 * theirs.norm(), "activations are rounded to 8 bits"


def test_the_engine_keeps_stored_integers_by_default(tmp_path: Path) -> None:
    path = str(write(tmp_path, "q4_k_m"))
    engine = Engine.load(path, cache_tokens=256)
    assert engine.network.precision == "stored"
    seq = engine.make_sequence(tuple(range(20, 30)), SamplingParams(max_tokens=5))
    engine.submit(seq)
    while seq.finish_reason is None:
        engine.step()
    assert Engine.load(path, precision="f32", cache_tokens=256).network.precision == "f32"
    (tmp_path / "plain").mkdir()
    assert Engine.load(str(write(tmp_path / "plain", "f16")), cache_tokens=256).network.precision == "f32"


def test_precisions_of_another_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp8: does not exist on a CPU"):
        Engine.load(str(write(tmp_path, "q8_0")), precision="fp8")


def test_bits_per_byte_grow_with_coarser_weights(tmp_path: Path) -> None:
    loaded = model_weights.read(write(tmp_path, "f32"))
    tokenizer = Tokenizer.load(loaded.tokenizer_json)
    text = tokenizer.decode(torch.randint(20, 200, (64,), generator=torch.Generator().manual_seed(2)).tolist())
    exact, int8, int4 = (bits_per_byte(loaded, name, [text], 48) for name in ("f32", "int8", "int4"))  # type: ignore[arg-type]
    assert int8[0] == pytest.approx(exact[0], rel=0.02)
    assert int4[0] == pytest.approx(exact[0], rel=0.2)
    assert int4[1] < int8[1] < exact[1]
