"""GGUF files load with the same numbers as in transformers; damaged and unsupported files are rejected."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.decode.speed import tokenizer_json

from lakh.cli.export import QUANTIZATIONS
from lakh.errors import DataError, UserError
from lakh.server.model.weights import read
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.special_tokens import SpecialTokens
from lakh.spec import Model, Optimizer, Run
from lakh.tokens.tokenizer import Tokenizer
from lakh.trainer.initial_weights import model_builder, read_weights
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import loss_sum, update
from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.formats import gguf, gguf_types
from lakh.workloads.code.model import CodeModel, init_weights

SPEC = Model(layers=1, width=32, heads=2, kv_heads=1, ffn=32, vocab=5, context=16, tied=True)
TOKENS = ["<|endoftext|>", "a", "b", "ab", "c"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def setting(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else 5
        items = b"".join(text(item) if kind == 8 else struct.pack("<i", item) for item in value)
        return text(key) + struct.pack("<IIQ", 9, kind, len(value)) + items
    form, kind = ("f", 6) if isinstance(value, float) else ("I", 4)
    return text(key) + struct.pack(f"<I{form}", kind, value)


SETTINGS = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": SPEC.layers,
    "llama.embedding_length": SPEC.width,
    "llama.feed_forward_length": SPEC.ffn,
    "llama.attention.head_count": SPEC.heads,
    "llama.attention.head_count_kv": SPEC.kv_heads,
    "llama.context_length": SPEC.context,
    "llama.attention.layer_norm_rms_epsilon": SPEC.norm_eps,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
}


def neighbours_first(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to query and key."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path: Path, weights: dict[str, torch.Tensor], settings: dict[str, Any] = SETTINGS) -> Path:
    table = parameters(SPEC)
    infos, body = b"", b""
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        if stem.endswith(("attention.q", "attention.k")):
            tensor = neighbours_first(tensor, SPEC.heads if stem.endswith("q") else SPEC.kv_heads)
        dims = tensor.shape[::-1]
        infos += text(table[name].gguf) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(body))
        body += tensor.contiguous().numpy().tobytes()
        body += bytes(-len(body) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(settings))
    head += b"".join(setting(key, value) for key, value in settings.items()) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def tiny_weights() -> dict[str, torch.Tensor]:
    model = CodeModel(SPEC)
    init_weights(model, 1)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_a_file_gives_model_weights_and_tokenizer(tmp_path: Path) -> None:
    weights = tiny_weights()
    loaded = gguf.load(write(tmp_path / "tiny.gguf", weights))
    assert (loaded.name, loaded.spec) == ("tiny", SPEC)
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in weights.items())
    assert Tokenizer(loaded.tokenizer_json).encode("abc") == [3, 4]
    assert gguf.is_gguf(tmp_path / "tiny.gguf")
    assert not gguf.is_gguf(tmp_path)


def test_the_chat_template_and_the_end_tokens_of_a_file_are_used(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.bos_token_id": 99}
    settings = {**SETTINGS, **ids, "tokenizer.chat_template": template, "general.name": "A title, not a name"}
    loaded = read(write(tmp_path / "tiny-q8.gguf", tiny_weights(), settings))
    assert loaded.name == "tiny-q8"
    tokenizer = Tokenizer.load(loaded.tokenizer_json)
    assert tokenizer.end_ids == (2, 3, 0)  # and <|endoftext|>
    found = ChatTemplate.load(str(loaded.tokenizer_json.parent))
    assert found is not None
    assert found.pieces([ChatMessage("user", "c")], SpecialTokens(tokenizer)) == [f"c{TOKENS[2]}"]
    plain = read(write(tmp_path / "plain.gguf", tiny_weights()))
    assert Tokenizer.load(plain.tokenizer_json).end_ids == (0,)
    assert ChatTemplate.load(str(plain.tokenizer_json.parent)) is None


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_quantized_types_can_be_read(kind: str) -> None:
    package = pytest.importorskip("gguf", reason="pip install gguf")
    quant = package.GGMLQuantizationType[kind]
    block, size = package.GGML_QUANT_SIZES[quant]
    zeros = np.zeros((2, size), np.uint8)
    assert package.quants.dequantize(zeros, quant).shape == (2, block)


WIDE = Model(layers=8, width=256, heads=4, kv_heads=2, ffn=512, vocab=320, context=16, tied=True)
BITS = {"q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.7, "q4_k_m": 4.9, "q4_1": 5.1, "q4_0": 4.6}
BITS |= {"bf16": 16, "f16": 16, "f32": 32}
ERRORS = {"q8_0": 0.008, "q6_k": 0.02, "q5_k_m": 0.045, "q4_k_m": 0.085, "q4_1": 0.09, "q4_0": 0.1}
"""Of a matrix, relative; of other formats below 0.005."""


@pytest.mark.parametrize("form", gguf_types.FORMATS)
def test_every_format_is_written_and_read_again(form: str, tmp_path: Path) -> None:
    model = CodeModel(WIDE)
    init_weights(model, 1)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer_json(WIDE.vocab))
    path = tmp_path / "model.gguf"
    num_bytes = gguf.save(path, "wide", WIDE, weights, tokenizer, quantization=form)
    assert num_bytes == path.stat().st_size
    loaded = gguf.load(path)
    assert loaded.spec == WIDE
    assert loaded.weights.is_quantized == form.startswith("q")
    matrices = [name for name, tensor in weights.items() if tensor.dim() == 2]
    stored = {name: loaded.weights.stored(name) for name in matrices}
    bits = 8 * sum(one.rows.nbytes for one in stored.values()) / sum(weights[name].numel() for name in matrices)
    assert bits == pytest.approx(BITS[form], rel=0.04)
    for name in weights:
        error = (loaded.weights[name] - weights[name]).norm() / weights[name].norm()
        assert error <= ERRORS.get(form, 0.005), name


def test_the_command_offers_every_format() -> None:
    assert QUANTIZATIONS == gguf_types.FORMATS


def test_a_mixed_format_has_more_bits_where_llama_cpp_has_them() -> None:
    def kind(name: str, layer: int, columns: int = 512, **more: bool) -> str:
        return gguf_types.type_of_tensor("q4_k_m", name, layer, 16, columns, is_head=more.get("is_head", False))

    more = [layer for layer in range(16) if kind("blk.0.attn_v.weight", layer) == "Q6_K"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [layer for layer in range(16) if kind("blk.0.ffn_down.weight", layer) == "Q6_K"] == more
    assert kind("blk.0.attn_q.weight", 0) == "Q4_K"
    assert kind("output.weight", 0, is_head=True) == "Q6_K"
    assert [kind("blk.0.attn_q.weight", 0, columns) for columns in (256, 576, 100)] == ["Q4_K", "Q5_0", "F16"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_integers_are_the_numbers_of_the_file(kind: str) -> None:
    package = pytest.importorskip("gguf", reason="pip install gguf")
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    values[0, :256], values[1, :32], values[2, 7] = 0, 3.0, 40.0
    raw = gguf_types.encode(values, kind)
    theirs = package.quants.dequantize(raw, package.GGMLQuantizationType[kind])
    found = gguf_types.integers(gguf_types.GgufTensor(kind, raw, 512))
    assert found is not None
    ours = found.values * found.scales[..., None] + (0 if found.minimums is None else found.minimums[..., None])
    error = np.abs(ours.reshape(values.shape) - theirs)
    if kind == "Q6_K":  # of two scales in a group the smaller is rounded to a quarter of the larger
        assert (error <= np.repeat(np.abs(found.scales), 32, axis=1) * 1.01).all()
        assert error.mean() < 0.2 * np.abs(theirs - values).mean()
    else:
        assert error.max() < 1e-6
    if kind.endswith("K"):  # better than the type with blocks of 32 and as many bits
        plain = f"Q{kind[1]}_0" if kind != "Q6_K" else "Q5_0"
        rounded = package.quants.dequantize(gguf_types.encode(values[3:], plain), package.GGMLQuantizationType[plain])
        assert np.square(theirs[3:] - values[3:]).sum() < np.square(rounded - values[3:]).sum()


def test_truncated_files_are_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tiny_weights()).read_bytes()
    for size in [*range(4, 900, 37), len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(DataError, match="download the file again"):
            gguf.load(tmp_path / "cut.gguf")


def test_a_damaged_header_is_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tiny_weights()).read_bytes()
    name = b"blk.0.attn_q.weight"
    kind = whole.index(name) + len(name) + struct.calcsize("<IQQ")  # behind it: number of dims, and two
    assert whole[kind : kind + 4] == struct.pack("<I", 0)  # F32
    damaged = {
        "overlaps the tensor before it": whole[:kind] + struct.pack("<I", 28) + whole[kind + 4 :],  # F64
        "can't decode byte": whole.replace(b"tiny", b"\xf2iny", 1),
    }
    for words, content in damaged.items():
        assert content != whole
        (tmp_path / "damaged.gguf").write_bytes(content)
        with pytest.raises(DataError, match=f"{words}.*download the file again"):
            gguf.load(tmp_path / "damaged.gguf")


def test_a_header_with_huge_counts_is_rejected_immediately(tmp_path: Path) -> None:
    array = text("general.tags") + struct.pack("<IIQ", 9, 0, 2**60)
    (tmp_path / "array.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + array)
    with pytest.raises(DataError, match="ends before byte"):
        gguf.load(tmp_path / "array.gguf")
    (tmp_path / "bomb.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60))
    with pytest.raises(DataError, match="ends before byte"):
        gguf.load(tmp_path / "bomb.gguf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3n"}, "is 'gemma3n'"),
        ({"llama.rope.scaling.type": "longrope"}, "is 'longrope'"),
        ({"tokenizer.ggml.model": "t5"}, r"is of the kind 't5'; lakh reads gpt2 .* and llama"),
        ({"tokenizer.ggml.pre": "viking"}, "is 'viking'; lakh knows smollm, starcoder"),
        ({"llama.attention.head_count": 3}, "3 does not divide width 32"),
    ],
)
def test_unsupported_settings_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        gguf.load(write(tmp_path / "other.gguf", tiny_weights(), {**SETTINGS, **change}))


def test_init_from_requires_a_matching_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_weights())
    assert torch.equal(read_weights(str(path), SPEC)["norm.weight"], torch.ones(32))
    with pytest.raises(UserError, match=r"model.ffn = 64: init_from .* has 32; set model.ffn = 32"):
        read_weights(str(path), Model(layers=1, width=32, heads=2, kv_heads=1, ffn=64, vocab=5, context=16))
    with pytest.raises(UserError, match="no such file or folder"):
        read_weights(str(tmp_path / "none"), SPEC)


@pytest.mark.slow
def test_finetuning_smollm2_on_code_lowers_its_loss(smollm2_gguf: Path) -> None:
    """A fine-tuning run without its checkpoint of 1.6 GB: weights from the file, updates, held-out loss."""
    loaded = gguf.load(smollm2_gguf)
    tokenizer = Tokenizer(loaded.tokenizer_json)
    folder = Path(json.__file__).parents[1] / "email"
    ids = [tokenizer.encode(path.read_text()) for path in sorted(folder.glob("*.py"))[:9]]
    rows = torch.tensor([text[at : at + 65] for text in ids for at in range(0, len(text) - 65, 1500)])
    heldout = Batch(rows[::3, :-1][:4], rows[::3, 1:][:4])
    learnt = torch.stack([row for number, row in enumerate(rows) if number % 3])
    run = Run(
        name="more-code",
        init_from=str(smollm2_gguf),
        model=loaded.spec,
        optim=Optimizer(lr=2e-4, warmup_steps=0, schedule="constant"),
    )
    model = model_builder(run)()
    optimizer = build_optimizer(model, run.optim)
    before = float(loss_sum(model, heldout)) / heldout.targets.numel()
    for step in range(3):
        part = learnt[2 * step : 2 * step + 2]
        update(model, optimizer, [Batch(part[:, :-1], part[:, 1:])], lr=run.optim.lr, clip_norm=run.optim.clip_norm)
    after = float(loss_sum(model, heldout)) / heldout.targets.numel()
    print(f"held-out loss {before:.3f} -> {after:.3f}")
    assert before < 6  # a uniform prediction has 10.8
    assert after < before
