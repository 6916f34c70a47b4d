"""Fine-tune a model: prepare the data, measure, train a run, measure again, write the adapters.

    OUT/tokens, OUT/corpus   the training data (see data.py)
    OUT/run.toml ...         a run like any other: its events, its checkpoints
    OUT/adapter              the adapters in the format of PEFT; not with rank 0, which trains every weight
    OUT/report.json          what `tune` returns

Both measurements are of the same held-out documents. After a stop the same call continues the run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch

from lakh import checkpoint, config, events, storage
from lakh.errors import Interrupted, UserError
from lakh.evals.perplexity import score_documents
from lakh.finetuning.data import TuningData, prepare
from lakh.finetuning.folder import WRITTEN, TuningFolder
from lakh.server.model import weights as model_weights
from lakh.server.model.weights import LoadedModel
from lakh.spec import Adapter, Checkpoints, Data, Optimizer, Run, Training, load_run
from lakh.tokens.dataset.token_set import TokenSet
from lakh.tokens.loading.stream import TokenSetLoader
from lakh.tokens.tokenizer import Tokenizer
from lakh.trainer.launch.local import resume_here, train_here
from lakh.trainer.preflight import check_run
from lakh.trainer.run_folder import has_checkpoints
from lakh.workloads.code.adapters import adapted_matrices, fingerprint
from lakh.workloads.code.architectures import require_finite
from lakh.workloads.code.formats import peft
from lakh.workloads.code.model import CodeModel

__all__ = [
    "REPORT",
    "check_settings",
    "first_settings",
    "given_settings",
    "is_set",
    "require_same",
    "train_or_resume",
    "tune",
    "with_warm_up",
    "write_report",
]

REPORT = "report.json"
EPOCHS = 3
WARM_UP_SHARE = 0.05
FIM_RATE = 0.5
ADAPTER_LR, FULL_LR = 2e-4, 2e-5
SEQUENCE, BATCH, MICRO_BATCH = 1024, 8, 2
SCORES = ("bits_per_byte", "interval", "perplexity_per_token", "documents", "tokens", "bytes")


def tune(
    model: str,
    sources: Sequence[str],
    out: str,
    *,
    rank: int = 16,
    steps: int | None = None,
    sets: Sequence[str] = (),
    nproc: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fine-tune the model at a path. `rank` 0 trains every weight; `steps` None is three passes over the data; `sets`
    are settings of the run, as for `lakh train`."""
    say(f"reading {model}")
    loaded = model_weights.read(model)
    first = first_settings(loaded, out, rank, lr=ADAPTER_LR if rank else FULL_LR)
    run = config.with_sets(first, sets, origin="lakh tune")
    with TuningFolder.open(out, sources) as folder:
        data = prepare(loaded, sources, out, run.data.sequence, say)
        if not sum(document.num_bytes for document in data.heldout):
            raise UserError(", ".join(sources), "no text is held out to measure with", "give more data")
        run = _with_data(run, data, Tokenizer.load(loaded.tokenizer_json), steps, sets)
        require_same(run, out, given_settings(steps, sets))
        check_settings(run, nproc)
        folder.keep_data()
        say(f"measuring {model} on {len(data.heldout)} held-out documents")
        before = score_documents(loaded, data.heldout)
        trained = train_or_resume(run, out, nproc, say)
        run = load_run(out)
        say("measuring the result")
        after = score_documents(model_weights.read(out), data.heldout)
        return write_report(
            run,
            out,
            trained,
            before={name: before[name] for name in SCORES},
            after={name: after[name] for name in SCORES},
            kind=data.kind,
            too_long=data.too_long,
        )


def train_or_resume(run: Run, out: str, nproc: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a run in the folder `out`, or continue the one that is there."""
    require_same(run, out)
    try:
        if has_checkpoints(out):
            say("continuing")
            return resume_here(out, nproc=nproc)
        say(f"training {run.train.steps} steps")
        return train_here(run, out, nproc=nproc, also_written=WRITTEN)
    except Interrupted as error:  # `lakh resume` would train to the end and measure nothing
        raise Interrupted(error.where, error.found, "continue with the same command") from None


def write_report(
    run: Run,
    out: str,
    trained: dict[str, Any],
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    kind: str,
    too_long: int,
) -> dict[str, Any]:
    """Write the adapters and the report of a finished run; returns the report."""
    speeds = [event.tokens_per_s for event in events.read(out, rank=0) if isinstance(event, events.StepDone)]
    report = {
        "before": before,
        "after": after,
        "steps": trained["steps"],
        "tok_per_s": statistics.median(speeds) if speeds else None,
        "adapter_bytes": _write_adapter(run, out) if run.adapter.rank else 0,
        "adapter": storage.join(out, "adapter") if run.adapter.rank else None,
        "base": run.init_from,
        "data": kind,
        "too_long": too_long,
        "run_dir": out,
    }
    storage.write_bytes(storage.join(out, REPORT), f"{json.dumps(report, indent=2)}\n".encode())
    return report


def first_settings(loaded: LoadedModel, out: str, rank: int, *, lr: float) -> Run:
    """The settings before the data is known. Refuses weights that are not finite."""
    require_finite(loaded.source, loaded.weights)
    return Run(
        name=PurePosixPath(out.rstrip("/")).name or "tune",
        init_from=loaded.source,
        model=loaded.spec,
        data=Data(sequence=min(SEQUENCE, loaded.spec.context), batch=BATCH, micro_batch=MICRO_BATCH),
        optim=Optimizer(lr=lr, warmup_steps=0, weight_decay=0.0),
        train=Training(eval_every=0),
        checkpoint=Checkpoints(every=100, keep=1),
        adapter=Adapter(rank=rank, alpha=2.0 * max(rank, 1), base_sha256=fingerprint(loaded.weights) if rank else ""),
    )


def _with_data(run: Run, data: TuningData, tokenizer: Tokenizer, steps: int | None, sets: Sequence[str]) -> Run:
    """The complete settings; those in `sets` stay."""
    has_fim = data.kind != "examples" and tokenizer.fim is not None
    tokens = TokenSet.open(data.tokens, "train")
    marked = tokens.marks_context
    settings = dataclasses.replace(
        run.data,
        tokens=data.tokens,
        packing="best-fit" if marked else run.data.packing,
        document_mask=True,
        fim_rate=run.data.fim_rate if is_set("data.fim_rate", sets) else FIM_RATE if has_fim and not marked else 0.0,
    )
    available = tokens.count_sequences(settings.sequence)
    if 0 < available < settings.batch:
        settings = dataclasses.replace(settings, batch=available, micro_batch=math.gcd(available, settings.micro_batch))
    if available and steps is None and not is_set("train.steps", sets):
        sequences = TokenSetLoader(tokens, sequence=settings.sequence, seed=0, packing=settings.packing).num_sequences
        steps = -(-EPOCHS * sequences // settings.batch)
    train = run.train if steps is None else dataclasses.replace(run.train, steps=steps)
    return with_warm_up(dataclasses.replace(run, data=settings, train=train), sets)


def is_set(path: str, sets: Sequence[str]) -> bool:
    return any(item.partition("=")[0].strip() == path for item in sets)


def with_warm_up(run: Run, sets: Sequence[str]) -> Run:
    """A run whose number of steps is known, with the warm-up that belongs to it."""
    if is_set("optim.warmup_steps", sets):
        return run
    optim = dataclasses.replace(run.optim, warmup_steps=int(WARM_UP_SHARE * run.train.steps))
    return dataclasses.replace(run, optim=optim)


def check_settings(run: Run, nproc: int) -> None:
    """Refuse what training would refuse, before the measurement, which takes minutes."""
    check_run(run, nproc)
    if run.adapter.rank:
        with torch.device("meta"):
            adapted_matrices(CodeModel(run.model), run.adapter)


def given_settings(steps: int | None, sets: Sequence[str]) -> tuple[str, ...]:
    """The numbers of training that a command states: what a run that it continues must have."""
    paths = [item.partition("=")[0].strip() for item in sets]
    found = [path for path in paths if path.startswith(("data.", "optim.", "train."))]
    return (*found, *(() if steps is None else ("train.steps",)))


def require_same(wanted: Run, out: str, given: Sequence[str] = ()) -> None:
    """A folder with a run is continued only if it fine-tunes the same model in the same way, with the settings `given`
    (given_settings)."""
    if not has_checkpoints(out):
        return
    before = load_run(out)
    if (before.adapter, before.model, before.preference) != (wanted.adapter, wanted.model, wanted.preference):
        found = f"holds a run that fine-tunes {before.init_from or 'no model'} with other adapters or another base"
        found += " or another objective"
        raise UserError(out, found, "choose another --out")
    for path in given:
        section, _, name = path.partition(".")
        old, new = (getattr(getattr(run, section), name) for run in (before, wanted))
        if old != new:
            found = f"holds a run with {path} = {old!r}, and this command has {new!r}"
            raise UserError(out, found, "continue it without another value, or choose another --out")


def _write_adapter(run: Run, out: str) -> int:
    """Write OUT/adapter; returns the bytes of its weights."""
    folder = storage.join(out, "adapter")
    _, adapters = checkpoint.read_model(checkpoint.find(out))
    peft.save(folder, run.model, adapters, run.adapter, base=run.init_from)
    return storage.local_path(storage.join(folder, peft.WEIGHTS)).stat().st_size
