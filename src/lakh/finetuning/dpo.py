"""Fine-tune a model on pairs of a chosen and a rejected answer (DPO).

    OUT/tokens          the pairs (see preferences.py)
    OUT/reference.npz   log-probabilities of the model before training, computed once
    OUT/run.toml ...    a run like any other, and OUT/adapter and OUT/report.json as `tune` writes them

Both measurements are of the same held-out pairs. After a stop the same call continues the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lakh import config, storage
from lakh.finetuning.folder import TuningFolder
from lakh.finetuning.preferences import PairData, measure_pairs, prepare_pairs, reference_of, score_pairs
from lakh.finetuning.tune import (
    check_settings,
    first_settings,
    given_settings,
    is_set,
    require_same,
    train_or_resume,
    with_warm_up,
    write_report,
)
from lakh.server.model import weights as model_weights
from lakh.spec import Preference, Run, load_run
from lakh.tokens.dataset.token_set import TokenSet
from lakh.trainer.initial_weights import read_weights
from lakh.trainer.step import uses_bf16

__all__ = ["tune_on_pairs"]

REFERENCE = "reference.npz"
ADAPTER_LR, FULL_LR = 5e-5, 5e-7
EPOCHS = 1


def tune_on_pairs(
    model: str,
    files: Sequence[str],
    out: str,
    *,
    rank: int = 16,
    beta: float = 0.1,
    steps: int | None = None,
    sets: Sequence[str] = (),
    nproc: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fine-tune the model at a path. `rank` 0 trains every weight; `steps` None is one pass over the pairs; `sets` are
    settings of the run, as for `lakh train`."""
    say(f"reading {model}")
    loaded = model_weights.read(model)
    first = first_settings(loaded, out, rank, lr=ADAPTER_LR if rank else FULL_LR)
    run = config.with_sets(_for_pairs(first, beta, out), sets, origin="lakh tune")
    with TuningFolder.open(out, files) as folder:
        data = prepare_pairs(loaded, files, out, run.data.sequence)
        run = _with_pairs(run, data, steps, sets)
        require_same(run, out, given_settings(steps, sets))
        check_settings(run, nproc)
        folder.keep_data()
        is_gpu = run.train.device != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda" if is_gpu else "cpu")
        precision: dict[str, Any] = {"bf16": uses_bf16(run.train, device), "device": device.type}
        say(f"computing the log-probabilities of {len(data.rows)} pairs")
        weights = read_weights(run.init_from, run.model)
        reference = reference_of(run.preference.reference, run.model, weights, data.rows, **precision).of(data.heldout)
        del weights
        trained = train_or_resume(run, out, nproc, say)
        run = load_run(out)
        say("measuring the result")
        found = score_pairs(run.model, read_weights(out, run.model), data.heldout, **precision)
        return write_report(
            run,
            out,
            trained,
            before=measure_pairs(reference, reference, run.preference.beta),
            after=measure_pairs(found, reference, run.preference.beta),
            kind="pairs",
            too_long=data.too_long,
        )


def _for_pairs(run: Run, beta: float, out: str) -> Run:
    """The settings before the pairs are known: two halves of a sequence, which is one document."""
    settings = dataclasses.replace(
        run.data, sequence=run.data.sequence // 2 * 2, packing="best-fit", document_mask=False, fim_rate=0.0
    )
    return dataclasses.replace(
        run, data=settings, preference=Preference(beta=beta, reference=storage.join(out, REFERENCE))
    )


def _with_pairs(run: Run, data: PairData, steps: int | None, sets: Sequence[str]) -> Run:
    """The complete settings; those in `sets` stay."""
    settings = dataclasses.replace(run.data, tokens=data.tokens)
    available = TokenSet.open(data.tokens, "train").num_documents
    if available < settings.batch:
        settings = dataclasses.replace(settings, batch=available, micro_batch=math.gcd(available, settings.micro_batch))
    if steps is None and not is_set("train.steps", sets):
        steps = -(-EPOCHS * available // settings.batch)
    train = run.train if steps is None else dataclasses.replace(run.train, steps=steps)
    return with_warm_up(dataclasses.replace(run, data=settings, train=train), sets)
