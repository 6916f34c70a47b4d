"""The Hugging Face directory: how lakh's models leave for other tools, and how theirs come in.

    config.json                  written last: without it the directory is no model
    model.safetensors            or model-00001-of-00003.safetensors ... with model.safetensors.index.json
    tokenizer.json, tokenizer_config.json, generation_config.json

One rename table serves both directions; no tensor is permuted, because model.py rotates in the same order. The
config is hf_config.py's.

Knows a spec.Model and names of tensors; knows nothing of checkpoints, engines or devices. What lakh's model cannot
represent is a UserError, damaged files are a CorruptCheckpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import CorruptCheckpoint, UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats.hf_config import PLAIN, config_of, spec_of
from lakh.workloads.code.tensors import check_weights, shapes

__all__ = [
    "END_OF_TEXT",
    "SHARD_BYTES",
    "check_weights",
    "load",
    "save",
    "shapes",
    "to_hf_name",
    "to_lakh_name",
]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
SHARD_BYTES = 4 << 30
END_OF_TEXT = "<|endoftext|>"
FIM_PAD = "<|fim_pad|>"
HEAD = "lm_head.weight"

# lakh -> Hugging Face; in a block's names, {} is its number.
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_OUTER_BACK = {theirs: ours for ours, theirs in _OUTER.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
# Position frequencies that old checkpoints store; they follow from rope_theta.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


def to_hf_name(name: str) -> str:
    """The Hugging Face name of one of CodeModel's tensors."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    if found and found[2] in _BLOCK:
        return f"model.layers.{found[1]}.{_BLOCK[found[2]]}.weight"
    outer = _OUTER.get(name.removesuffix(".weight"))
    if outer is None:
        raise UserError(name, "is no tensor of lakh's code model", "export a checkpoint of the code workload")
    return f"{outer}.weight"


def to_lakh_name(name: str) -> str | None:
    """CodeModel's name of a Hugging Face tensor; None where it has no such tensor."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if found and found[2] in _BLOCK_BACK:
        return f"blocks.{found[1]}.{_BLOCK_BACK[found[2]]}.weight"
    outer = _OUTER_BACK.get(name.removesuffix(".weight"))
    return None if outer is None else f"{outer}.weight"


# --- writing ------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    spec: Model,
    weights: Mapping[str, Tensor],
    tokenizer_json: str | Path | None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write the directory and return the names of its files. An older export there is replaced."""
    check_weights(str(folder), spec, weights, todo="export the checkpoint with the run that made it")
    special = {END_OF_TEXT: 0} if tokenizer_json is None else _read_special_ids(tokenizer_json, spec)
    storage.require_space(folder, sum(tensor.nbytes for tensor in weights.values()))
    for name in [CONFIG, *storage.list_dir(folder)]:  # config.json first: from here on there is no model
        if name == CONFIG or WEIGHTS.fullmatch(name):
            storage.remove_tree(storage.join(folder, name))
    files = _save_weights(folder, weights, shard_bytes)
    if tokenizer_json is not None:
        storage.write_bytes(storage.join(folder, "tokenizer.json"), storage.read_bytes(tokenizer_json))
        _write_json(folder, "tokenizer_config.json", _tokenizer_config(spec, special))
        files += ["tokenizer.json", "tokenizer_config.json"]
    ids = {f"{role}_token_id": special[token] for role, token in _roles(special).items()}
    _write_json(folder, "generation_config.json", {"_from_model_config": True, **ids})
    _write_json(folder, CONFIG, config_of(spec, weights["embed.weight"].dtype, ids))
    return [*files, "generation_config.json", CONFIG]


def _save_weights(folder: str | Path, weights: Mapping[str, Tensor], shard_bytes: int) -> list[str]:
    shards: list[dict[str, Tensor]] = [{}]
    size_bytes = 0
    for name, tensor in weights.items():
        if shards[-1] and size_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            size_bytes = 0
        shards[-1][to_hf_name(name)] = tensor
        size_bytes += tensor.nbytes
    many = len(shards) > 1
    files = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        storage.write_bytes(storage.join(folder, file), safetensors.torch.save(tensors, {"format": "pt"}))
    if not many:
        return files
    total = sum(tensor.nbytes for tensor in weights.values())
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    _write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return [*files, INDEX]


def _roles(special: Mapping[str, int]) -> dict[str, str]:
    # Padding has a token of its own: a fine-tuner that ignores padding would otherwise never learn to stop.
    return {"bos": END_OF_TEXT, "eos": END_OF_TEXT, "pad": FIM_PAD if FIM_PAD in special else END_OF_TEXT}


def _tokenizer_config(spec: Model, special: Mapping[str, int]) -> dict[str, Any]:
    roles = _roles(special)
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": token for role, token in roles.items()},
        "additional_special_tokens": [token for token in special if token not in roles.values()],
        "added_tokens_decoder": {str(number): {"content": token, **flags} for token, number in special.items()},
        "clean_up_tokenization_spaces": False,  # true would eat spaces before punctuation: code must survive
        "model_max_length": spec.context,
    }


def _read_special_ids(tokenizer_json: str | Path, spec: Model) -> dict[str, int]:
    """Special token -> id, from tokenizer.json itself; refuses a tokenizer that does not fit the model."""
    where, data = str(tokenizer_json), _read_json(tokenizer_json)
    try:
        ids = {token["content"]: int(token["id"]) for token in data.get("added_tokens", []) if token["special"]}
        largest = max([*data["model"]["vocab"].values(), *ids.values()])
    except (KeyError, TypeError, AttributeError, ValueError):
        raise _damaged(where, "is no tokenizer with a vocabulary") from None
    if END_OF_TEXT not in ids:
        raise UserError(where, f"has no special token {END_OF_TEXT}", "use a tokenizer of lakh tokens train")
    if largest >= spec.vocab:
        found = f"has ids up to {largest} and the model's vocabulary has {spec.vocab} entries"
        raise UserError(where, found, "use the tokenizer that the model was trained with")
    return ids


def _write_json(folder: str | Path, name: str, data: dict[str, Any]) -> None:
    storage.write_bytes(storage.join(folder, name), (json.dumps(data, indent=2) + "\n").encode())


# --- reading ------------------------------------------------------------------------------------------------


def load(folder: str | Path) -> tuple[Model, dict[str, Tensor]]:
    """The model and its weights, by CodeModel's names, on the CPU and in the type they are stored in."""
    config = _read_json(storage.join(folder, CONFIG))
    where = storage.join(folder, CONFIG)
    spec = spec_of(where, config)
    weights: dict[str, Tensor] = {}
    foreign = None
    for theirs, tensor in _read_weights(folder).items():
        name = to_lakh_name(theirs)
        if name is not None:
            weights[name] = tensor
        elif not _DERIVED.fullmatch(theirs):
            raise UserError(str(folder), f"has a tensor {theirs}", PLAIN)
    if spec.tied:
        foreign = weights.pop("head.weight", None)
    if foreign is not None and "embed.weight" in weights and not torch.equal(foreign, weights["embed.weight"]):
        found = f"says tie_word_embeddings and the weights have a {HEAD} of their own"
        raise UserError(where, found, "set tie_word_embeddings to false")
    check_weights(str(folder), spec, weights, todo="copy or convert the model again")
    return spec, weights


def _read_weights(folder: str | Path) -> dict[str, Tensor]:
    names = storage.list_dir(folder)
    if INDEX in names:
        places = _read_json(storage.join(folder, INDEX)).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise _damaged(storage.join(folder, INDEX), "has no weight_map")
        files = sorted(set(places.values()))
    elif "model.safetensors" in names:
        files = ["model.safetensors"]
    elif any(name.endswith(".bin") for name in names):
        todo = "save it again with transformers: model.save_pretrained(folder)"
        raise UserError(str(folder), "holds pickled weights (.bin), which can run code when read", todo)
    else:
        raise UserError(str(folder), "has a config.json and no model.safetensors", "copy the model again")
    weights: dict[str, Tensor] = {}
    for file in files:
        if file not in names:  # also refuses names that lead out of the folder
            raise _damaged(storage.join(folder, INDEX), f"names {file!r}, which is not there")
        path = storage.join(folder, file)
        try:
            weights |= safetensors.torch.load_file(storage.local_path(path))
        except (safetensors.SafetensorError, OSError) as error:
            raise _damaged(path, f"cannot be read ({error})") from None
    return weights


def _read_json(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(storage.read_bytes(path))
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise _damaged(str(path), "is not a JSON object")
    return data


def _damaged(where: str, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(where, found, "copy or export the model again")
