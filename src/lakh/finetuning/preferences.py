"""Pairs of a chosen and a rejected answer, as rows of JSONL files, to the data of DPO.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                      plain text, joined as it is
    {"messages": [{"role": "user", ...}], "chosen": "...", "rejected": "..."}  by the model's chat template

A pair becomes one sequence of a token set (workloads/code/preference.py). The log-probabilities of the reference, which
is the model before training, are computed once and kept beside the token set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.finetuning.data import MAX_SCORED, heldout_limit, split_keys
from lakh.finetuning.examples import ExampleEncoder, TuningExample, read_rows
from lakh.server.model.weights import LoadedModel
from lakh.server.prompts.chat_template import ChatTemplate
from lakh.spec import Model
from lakh.tokens.dataset.packing import is_heldout, sort_key
from lakh.tokens.dataset.shards import CONTEXT, TokenSetWriter
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.preference import (
    PreferenceBatch,
    ReferenceFile,
    pair_log_probabilities,
    preference_losses,
    split_sides,
)

__all__ = ["PairData", "encode_pair", "measure_pairs", "prepare_pairs", "reference_of", "score_pairs"]

FORM = 'write {"prompt": ..., "chosen": ..., "rejected": ...}, or "messages" in place of "prompt"'
PAIRS_OF_A_PASS = 4
"""Pairs that a model reads at once to score them."""


@dataclass(frozen=True, eq=False)
class PairData:
    tokens: str
    """Folder of the token set."""
    rows: np.ndarray
    """All pairs as the token set has them, N x (sequence + 1)."""
    heldout: np.ndarray
    """Those that are measured before and after."""
    too_long: int = 0
    """Pairs with a side that does not fit into half a sequence; they were left out."""


def prepare_pairs(model: LoadedModel, files: Sequence[str], out: str, sequence: int) -> PairData:
    """Write the token set of a run into its folder `out`. `sequence`: tokens of a pair."""
    tokenizer = Tokenizer.load(model.tokenizer_json)
    encoder = ExampleEncoder(tokenizer, ChatTemplate.load(str(model.tokenizer_json.parent)))
    pairs = list(dict.fromkeys(encode_pair(encoder, row, where) for row, where in read_rows(files, FORM)))
    length = sequence // 2
    fitting = [pair for pair in pairs if max(len(side.ids) for side in pair) < length]  # and the end
    if len(fitting) < 2:
        found = f"{len(fitting)} pairs of answers of less than {length} tokens with their prompt were found, "
        found += f"{len(pairs)} in all"
        raise UserError(", ".join(files), found, "give at least two, or a longer data.sequence, which holds both sides")
    keys = split_keys([chosen for chosen, _ in fitting])
    share = heldout_limit(keys, ", ".join(files))
    tokens = storage.join(out, "tokens")
    rows, is_left_out = [], []
    with TokenSetWriter(tokens, tokenizer, marks_context=True) as writer:
        keyed = zip(keys, fitting, strict=True)
        for key, pair in sorted(keyed, key=lambda one: sort_key("".join(side.sha256 for side in one[1]))):
            row = np.concatenate([_side(side, length, tokenizer.eot) for side in pair])
            is_left_out.append(is_heldout(key, share))
            writer.add("heldout" if is_left_out[-1] else "train", row)
            rows.append(np.append(row, tokenizer.eot))  # as the writer does
        writer.commit({"made_from": "pairs"})
    whole = np.array(rows, np.int32)
    heldout = whole[np.array(is_left_out)][:MAX_SCORED]
    return PairData(tokens, whole, heldout, too_long=len(pairs) - len(fitting))


def encode_pair(encoder: ExampleEncoder, row: Any, where: str) -> tuple[TuningExample, TuningExample]:
    """The chosen and the rejected side of a row. Raises UserError, which begins with `where`, for anything else."""
    if not isinstance(row, dict):
        raise UserError(where, "is not a JSON object", FORM)
    answers = []
    for name in ("chosen", "rejected"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise UserError(where, f"{name} is missing, empty or not text", FORM)
        answers.append(row[name])
    if answers[0] == answers[1]:
        raise UserError(where, "the chosen and the rejected answer are the same", "remove the row")
    messages, prompt = row.get("messages"), row.get("prompt")
    forms: list[dict[str, Any]]
    if isinstance(messages, list) and messages:
        forms = [{"messages": [*messages, {"role": "assistant", "content": answer}]} for answer in answers]
    elif isinstance(prompt, str) and prompt:
        forms = [{"prompt": prompt, "completion": answer} for answer in answers]
    else:
        raise UserError(where, "has neither a prompt nor messages", FORM)
    chosen, rejected = (encoder.encode(form, where) for form in forms)
    return chosen, rejected


def _side(side: TuningExample, length: int, end: int) -> np.ndarray:
    """Prompt, answer and end, padded; all but the answer and the end are marked as context."""
    ids, is_learned = [*side.ids, end], [*side.is_answer, True]
    padding = length - len(ids)
    return np.array(ids + [end] * padding) + np.where(is_learned + [False] * padding, 0, CONTEXT)


@torch.no_grad()
def score_pairs(spec: Model, weights: Mapping[str, Tensor], rows: np.ndarray, *, bf16: bool, device: str) -> np.ndarray:
    """N x 2: log-probabilities that these weights give to the chosen and to the rejected answers."""
    model = CodeModel(spec)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.dtype = torch.bfloat16 if bf16 else None
    model.to(device).eval()
    found = []
    for at in range(0, len(rows), PAIRS_OF_A_PASS):
        inputs, targets = (torch.from_numpy(array).to(device) for array in split_sides(rows[at : at + PAIRS_OF_A_PASS]))
        batch = PreferenceBatch(inputs, targets, torch.zeros(len(inputs) // 2, 2, device=device))
        found.append(pair_log_probabilities(model, batch).double().cpu().numpy())
    return np.concatenate(found)


def reference_of(
    url: str, spec: Model, weights: Mapping[str, Tensor], rows: np.ndarray, *, bf16: bool, device: str
) -> ReferenceFile:
    """The reference's log-probabilities of these pairs: as the file has them, or computed and written."""
    if storage.exists(url):
        try:
            known = ReferenceFile.read(url)
            known.of(rows)
            return known
        except DataError:  # damaged, or of other pairs
            pass
    ReferenceFile.write(url, rows, score_pairs(spec, weights, rows, bf16=bf16, device=device))
    return ReferenceFile.read(url)


def measure_pairs(found: np.ndarray, reference: np.ndarray, beta: float) -> dict[str, Any]:
    """How a model's log-probabilities N x 2 prefer the chosen answers, by themselves and beside the reference."""
    losses = preference_losses(torch.from_numpy(found), torch.from_numpy(reference), beta)
    margins, rewards = found[:, 0] - found[:, 1], beta * (found - reference)
    gained = rewards[:, 0] - rewards[:, 1]
    return {
        "pairs": len(found),
        "loss": float(losses.mean()),
        "prefers_chosen": float((margins > 0).mean()),
        "margin": float(margins.mean()),
        "reward_accuracy": float((gained > 0).mean()),
        "reward_margin": float(gained.mean()),
    }
