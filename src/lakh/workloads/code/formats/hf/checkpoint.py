"""Read and write Hugging Face model directories.

    config.json                  written last: without it the directory is no model
    model.safetensors            or model-00001-of-00003.safetensors ... with model.safetensors.index.json
    tokenizer.json, tokenizer_config.json, generation_config.json, and what else a checkpoint's tokenizer brought

Tensor names come from the architecture's table (architectures/); no tensor is permuted. A model that lakh cannot
represent is a UserError, damaged files are a CorruptCheckpoint.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import CorruptCheckpoint, UserError
from lakh.spec.model import MOST_LAYERS, Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.architectures import (
    ParameterInfo,
    architecture_of,
    check_weights,
    join_rows,
    parameters,
    rows_of_file_tensors,
    shapes,
    split_rows,
)
from lakh.workloads.code.formats.hf import eight_bit, mxfp4, packed_int, text_model
from lakh.workloads.code.formats.hf.config import config_of, known_architectures, spec_of

log = logging.getLogger(__name__)

__all__ = ["SHARD_BYTES", "check_weights", "load", "save", "shapes"]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
SHARD_BYTES = 4 << 30
# Of a tokenizer, besides tokenizer.json.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD = "lm_head.weight"

# Position frequencies, which follow from rope_theta, and causal masks: old checkpoints store them.
_DERIVED = re.compile(
    r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq"
    r"|transformer\.(h\.\d+\.attn\.(masked_)?)?bias"
)


# --- writing ------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    spec: Model,
    weights: Mapping[str, Tensor],
    tokenizer_json: str | Path | None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write the directory and return the names of its files. Replaces an older export."""
    check_weights(str(folder), spec, weights, todo="export the checkpoint with the run that made it")
    tokenizer = None if tokenizer_json is None else _load_tokenizer(tokenizer_json, spec)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0} if tokenizer is None else _role_ids(tokenizer)
    config = config_of(spec, weights["embed.weight"].dtype, ids)  # refused before an older export is removed
    storage.require_space(folder, sum(tensor.nbytes for tensor in weights.values()))
    for name in [CONFIG, *storage.list_dir(folder)]:  # config.json first: without it there is no model
        if name == CONFIG or WEIGHTS.fullmatch(name):
            storage.remove_tree(storage.join(folder, name))
    files = _save_weights(folder, spec, weights, shard_bytes)
    if tokenizer is not None and tokenizer_json is not None:
        files += _save_tokenizer(folder, spec, tokenizer, tokenizer_json)
    _write_json(folder, "generation_config.json", {"_from_model_config": True, **ids})
    _write_json(folder, CONFIG, config)
    return [*files, "generation_config.json", CONFIG]


def _save_weights(folder: str | Path, spec: Model, weights: Mapping[str, Tensor], shard_bytes: int) -> list[str]:
    shards: list[dict[str, Tensor]] = [{}]
    size_bytes = 0
    for name, tensor in _file_tensors(spec, weights):
        if shards[-1] and size_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            size_bytes = 0
        shards[-1][name] = tensor
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


def _file_tensors(spec: Model, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names in the file, each expert and each head of norms by itself."""
    table = parameters(spec)
    stored = {name: info for name, info in table.items() if name in weights}  # in order: rows of a tensor are, too
    for theirs, rows in rows_of_file_tensors(stored, lambda info: info.hf).items():
        parts = [_to_file(table[name], weights[name]) for name in rows]
        tensor = parts[0] if len(parts) == 1 else join_rows(spec, table[next(iter(rows))], parts)
        if "{}" in theirs:
            yield from ((theirs.format(number), part) for number, part in enumerate(tensor))
        else:
            yield theirs, tensor


def _load_tokenizer(tokenizer_json: str | Path, spec: Model) -> Tokenizer:
    """Rejects a tokenizer that does not fit the model."""
    tokenizer = Tokenizer.load(tokenizer_json)
    if tokenizer.vocab_size > spec.vocab:
        found = f"has ids up to {tokenizer.vocab_size - 1}; the model's vocabulary has {spec.vocab} entries"
        raise UserError(str(tokenizer_json), found, "use the tokenizer that the model was trained with")
    return tokenizer


def _role_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of special tokens as config.json and generation_config.json name them."""
    ends = list(tokenizer.end_ids)
    roles: dict[str, Any] = {"bos_token_id": next(iter([*tokenizer.begin_ids, *ends]), None)}
    roles["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    # Padding has its own token where there is one: otherwise fine-tuning that ignores padding never learns to stop.
    roles["pad_token_id"] = next(iter(ends), None) if tokenizer.pad_id is None else tokenizer.pad_id
    return {name: number for name, number in roles.items() if number is not None}


def _save_tokenizer(folder: str | Path, spec: Model, tokenizer: Tokenizer, tokenizer_json: str | Path) -> list[str]:
    """tokenizer.json, and the files beside it that a checkpoint brought; else a tokenizer_config.json of our own."""
    files = ["tokenizer.json"]
    tokenizer.save(folder)
    source = str(tokenizer_json).rpartition("/")[0] or "."
    for name in storage.list_dir(source):
        if name in TOKENIZER_FILES:
            storage.write_bytes(storage.join(folder, name), storage.read_bytes(storage.join(source, name)))
            files.append(name)
    if "tokenizer_config.json" not in files:
        _write_json(folder, "tokenizer_config.json", _tokenizer_config(spec, tokenizer))
        files.append("tokenizer_config.json")
    return files


def _tokenizer_config(spec: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {name.removesuffix("_id"): number for name, number in _role_ids(tokenizer).items()}
    roles = {name: tokenizer.token(ids[0] if isinstance(ids, list) else ids) for name, ids in ids.items()}
    special = {
        token["content"]: token["id"] for token in json.loads(tokenizer.raw).get("added_tokens", ()) if token["special"]
    }
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "additional_special_tokens": [token for token in special if token not in roles.values()],
        "added_tokens_decoder": {str(number): {"content": token, **flags} for token, number in special.items()},
        "clean_up_tokenization_spaces": False,  # true removes spaces before punctuation, which breaks code
        "model_max_length": spec.context,
    }


def _write_json(folder: str | Path, name: str, data: dict[str, Any]) -> None:
    storage.write_bytes(storage.join(folder, name), (json.dumps(data, indent=2) + "\n").encode())


# --- reading ------------------------------------------------------------------------------------------------


def load(folder: str | Path) -> tuple[Model, dict[str, Tensor]]:
    """The model and its weights, by CodeModel's names, on the CPU in the stored type."""
    where = storage.join(folder, CONFIG)
    whole = _read_json(where)
    config = text_model.config_of(where, whole)
    spec = spec_of(where, config)
    tensors = _read_weights(folder)
    if text_model.has_images(whole):
        tensors = text_model.tensors_of(str(folder), tensors)
        if "tie_word_embeddings" not in whole:  # its default is not the same in all versions of transformers
            spec = replace(spec, tied=HEAD not in tensors)
    names, stacked = _names(spec)
    table = parameters(spec)
    weights: dict[str, Tensor] = {}
    head = None
    modules = architecture_of(spec).hf_modules
    tensors = _with_prefix(tensors, modules.prefix)
    tensors = _without_further_layers(str(folder), spec, config, tensors, f"{modules.prefix}{modules.blocks}")
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    method = quantization.get("quant_method")
    if method == "mxfp4":
        tensors = mxfp4.unpack(str(folder), tensors)
    if method in eight_bit.METHODS:
        eight_bit.unpack(str(folder), tensors, eight_bit.block_size_of(quantization))
    if method in packed_int.METHODS:
        packed_int.unpack(str(folder), tensors, quantization)
    for theirs, tensor in tensors.items():
        if tensor.dtype not in PLAIN_DTYPES:
            found = f"{theirs} holds {str(tensor.dtype).removeprefix('torch.')}: the weights are quantized"
            raise UserError(str(folder), found, "give a model in float32, bfloat16 or float16")
        if theirs in names:
            weights |= _parts(spec, table, names[theirs], tensor, where=f"{theirs} ({folder})")
        elif theirs in stacked:
            _put(weights, *stacked.pop(theirs), tensor, where=f"{theirs} ({folder})")
        elif theirs == HEAD:  # of a tied model
            head = tensor
        elif not _DERIVED.fullmatch(theirs):
            found = f"has an unknown tensor {theirs}, which {config.get('model_type')} does not have"
            raise UserError(str(folder), found, known_architectures())
    if head is not None and "embed.weight" in weights and not torch.equal(head, weights["embed.weight"]):
        found = f"has tie_word_embeddings, but {HEAD} differs from the embedding"
        raise UserError(where, found, "set tie_word_embeddings to false")
    incomplete = [theirs for theirs, ours in names.items() if not ours.keys() <= weights.keys()]
    missing = next(iter([*incomplete, *stacked]), None)
    if missing is not None:
        raise _damaged(str(folder), f"has no tensor {missing}")
    weights |= {name: weights[name].flatten() for name, info in table.items() if info.num_heads}
    check_weights(str(folder), spec, weights, todo="copy or convert the model again")
    return spec, weights


def _without_further_layers(
    where: str, spec: Model, config: Mapping[str, Any], tensors: dict[str, Tensor], blocks: str
) -> dict[str, Tensor]:
    """Without the layers behind the last one that predict further tokens (multi-token prediction), which a model can
    do without."""
    counts = [config.get(key) for key in ("num_nextn_predict_layers", "num_mtp_layers")]
    further = max(count for count in (*counts, 0) if type(count) is int and count <= MOST_LAYERS)
    prefixes = tuple(f"{blocks}.{layer}." for layer in range(spec.layers, spec.layers + further))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
    if len(kept) < len(tensors):
        log.warning("%s: left out %d tensors of layers that predict further tokens", where, len(tensors) - len(kept))
    return kept


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Names as those of a model with a head, also where the model was saved without one."""
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name == HEAD else f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _from_file(info: ParameterInfo, tensor: Tensor) -> Tensor:
    if info.hf_layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous()
    return tensor[..., None] if info.hf_layout == "flat" else tensor


def _to_file(info: ParameterInfo, tensor: Tensor) -> Tensor:
    if info.hf_layout == "transposed":
        return tensor.mT
    if info.num_heads:
        return tensor.unflatten(0, (info.num_heads, -1))
    return tensor[..., 0] if info.hf_layout == "flat" else tensor


def _names(spec: Model) -> tuple[dict[str, dict[str, int]], dict[str, tuple[str, tuple[int, ...], int]]]:
    """Names in the file: of whole tensors, with the parameters that are their rows; and of experts and heads, with the
    tensor that holds all, its shape, their number."""
    table, stacked = parameters(spec), {}
    names = rows_of_file_tensors(table, lambda info: info.hf)
    for name, info in table.items():
        if "{}" in info.hf:
            del names[info.hf]
            shape = (info.num_heads, info.shape[0] // info.num_heads) if info.num_heads else info.shape
            for part in range(shape[0]):
                stacked[info.hf.format(part)] = name, shape, part
    return names, stacked


def _parts(
    spec: Model, table: Mapping[str, ParameterInfo], rows: Mapping[str, int], tensor: Tensor, where: str
) -> dict[str, Tensor]:
    """The parameters that are the rows of a tensor of the file."""
    if len(rows) == 1:
        return {name: _from_file(table[name], tensor) for name in rows}
    first = table[next(iter(rows))]
    if first.hf_layout == "transposed":
        experts, size, width = first.shape
        if tuple(tensor.shape) != (experts, width, len(rows) * size):
            found = f"has shape {list(tensor.shape)}; its settings require {[experts, width, len(rows) * size]}"
            raise CorruptCheckpoint(where, found, "copy or convert the model again")
        parts = tensor.chunk(len(rows), dim=-1)
        return {name: _from_file(table[name], part) for name, part in zip(rows, parts, strict=True)}
    if tensor.dim() == 0 or len(tensor) != sum(rows.values()):
        found = f"has shape {list(tensor.shape)}; its settings require {sum(rows.values())} rows"
        raise CorruptCheckpoint(where, found, "copy or convert the model again")
    return dict(zip(rows, split_rows(spec, first, tensor, list(rows.values())), strict=True))


def _put(
    weights: dict[str, Tensor], name: str, shape: tuple[int, ...], expert: int, tensor: Tensor, where: str
) -> None:
    if tuple(tensor.shape) != shape[1:]:
        found = f"has shape {list(tensor.shape)}; its settings require {list(shape[1:])}"
        raise CorruptCheckpoint(where, found, "copy or convert the model again")
    weights.setdefault(name, torch.empty(shape, dtype=tensor.dtype))[expert] = tensor


def _read_weights(folder: str | Path) -> dict[str, Tensor]:
    names = storage.list_dir(folder)
    if "model.safetensors" in names:  # before the index of shards, as transformers does
        files = ["model.safetensors"]
    elif INDEX in names:
        places = _read_json(storage.join(folder, INDEX)).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise _damaged(storage.join(folder, INDEX), "has no weight_map")
        files = sorted(set(places.values()))
    elif any(name.endswith(".bin") for name in names):
        todo = "save it again with transformers: model.save_pretrained(folder)"
        raise UserError(str(folder), "holds pickled weights (.bin), which can run code when loaded", todo)
    else:
        raise UserError(str(folder), "has a config.json and no model.safetensors", "copy the model again")
    weights: dict[str, Tensor] = {}
    for file in files:
        if file not in names:  # also rejects names that lead out of the folder
            raise _damaged(storage.join(folder, INDEX), f"names {file!r}, which does not exist")
        path = storage.join(folder, file)
        _require_readable(path)
        try:
            found = safetensors.torch.load_file(storage.local_path(path))
        except (safetensors.SafetensorError, OSError) as error:
            raise _damaged(path, f"cannot be read ({error})") from None
        if twice := weights.keys() & found.keys():
            raise _damaged(path, f"has the tensor {min(twice)}, which another file has, too")
        weights |= found
    return weights


def _require_readable(path: str) -> None:
    """safetensors says of a file without permission that it does not exist."""
    place = storage.local_path(path)
    try:
        place.open("rb").close()
    except OSError as error:
        raise storage.explain(error, path) or _damaged(path, f"cannot be read ({error})") from None


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
