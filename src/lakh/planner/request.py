"""What a plan command asks for: a run file, or a model, a cluster and a number of GPUs, and options of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lakh.errors import UserError
from lakh.planner.calibration.program_factor import LAKH
from lakh.planner.calibration.published_sources import program_names, program_plan
from lakh.planner.catalogue import load_model
from lakh.planner.cost.prices import cluster_price
from lakh.planner.execution_plan import CUDA_GRAPHS, RECOMPUTE, ExecutionPlan, plan_of_run, run_of_model, run_with_plan
from lakh.planner.memory import OPTIMIZER_BYTES
from lakh.planner.search.candidates import SearchConstraints
from lakh.planner.search.layout_search import LayoutSearchResult, search
from lakh.spec.cluster import Cluster, load_cluster
from lakh.spec.model import Model
from lakh.spec.run import Run, load_run

__all__ = ["PRECISIONS", "PlanRequest"]

PRECISIONS = {"bf16": 0.0, "fp8": 1.0, "nvfp4": 2.0}
STEP_TOKENS = 2**22
"""Tokens per step where no batch is given."""
REQUEST_NAMES = ("run", "model", "cluster", "gpus", "batch", "sequence", "tokens")
_MESH_OPTIONS = {"tp", "pp", "cp", "ep", "shard"}  # giving any of them replaces the whole mesh of a run


# Option with a choice -> field of an ExecutionPlan, value of each choice.
_CHOICES: dict[str, tuple[str, Mapping[str, float]]] = {
    "recompute": ("recompute", {name: i for i, name in enumerate(RECOMPUTE)}),
    "graphs": ("cuda_graphs", {name: i for i, name in enumerate(CUDA_GRAPHS)}),
    "precision": ("low_precision", PRECISIONS),
    "attention": ("native_attention", {"older": 0, "native": 1}),
    "optimizer": ("optimizer_bytes", OPTIMIZER_BYTES),
}


@dataclass(frozen=True)
class PlanRequest:
    name: str
    model: Model
    cluster: Cluster
    gpus: int
    batch: int
    sequence: int
    tokens: float | None
    """Of the whole run, for its days and cost."""
    run: Run | None
    """The run file, if the request names one."""
    cluster_name: str = ""
    """The cluster as the command names it."""

    @classmethod
    def of(cls, options: dict[str, Any], model_of: Callable[[str], Model] = load_model) -> PlanRequest:
        """The request in options of a command, which are removed; the rest are options of a plan or a search.
        `model_of` finds the model of `--model`."""
        run, model, cluster, gpus, batch, sequence, tokens = (options.pop(name) for name in REQUEST_NAMES)
        if tokens is not None and tokens <= 0:
            raise UserError("--tokens", f"{tokens:g} is not positive", "give e.g. 1.4e12")
        if run and model:
            raise UserError("lakh plan", "got a run and --model", "give one of them")
        if run:
            loaded = load_run(run)
            data = replace(loaded.data, batch=batch or loaded.data.batch, sequence=sequence or loaded.data.sequence)
            loaded = replace(loaded, data=data, cluster=load_cluster(cluster) if cluster else loaded.cluster)
            gpus, tokens = gpus or loaded.mesh.ranks, tokens or float(loaded.tokens)
            return cls("plan", loaded.model, loaded.cluster, gpus, data.batch, data.sequence, tokens, loaded)
        if not (model and cluster and gpus):
            todo = "give a run, or --model, --cluster and --gpus"
            raise UserError("lakh plan", "got neither a run nor a model", todo)
        sequence = sequence or 8192
        batch = batch or max(STEP_TOKENS // sequence, 1)
        return cls(model, model_of(model), load_cluster(cluster), gpus, batch, sequence, tokens, None, cluster)

    def execution_plan(self, program: str = LAKH, **options: Any) -> ExecutionPlan:
        """The plan of the run, or of a program (lakh's stands for any modern fused one), changed by the options that
        are not None."""
        if program != LAKH and self.run is not None:
            raise UserError(f"--program {program}", "a run is executed by lakh", "give --model instead of a run")
        given = {name: value for name, value in options.items() if value is not None}
        self._check_precision(given.get("precision", "bf16"))
        if self.run is None:
            sizes = {"gpus": self.gpus, "sequence": self.sequence, "batch": self.batch}
            plan = ExecutionPlan.of(**sizes, **_program_settings(program))
        elif _MESH_OPTIONS & given.keys():
            plan = self._plan_without_mesh(self.run)
        else:
            plan = plan_of_run(self.run, self.gpus)
        plan = replace(plan, **{name: float(value) for name, value in _as_fields(given).items()})
        if int(plan.shard) > 1:
            plan = replace(plan, zero=0.0)
        return replace(plan, sequence_parallel=float(int(plan.tp) > 1))

    def _check_precision(self, precision: str) -> None:
        gpu = self.cluster.gpu
        if precision not in gpu.precisions:
            known = ", ".join(gpu.precisions)
            raise UserError(
                f"--precision {precision}", f"a {gpu.kind} has no such matrix units", f"choose from: {known}"
            )

    def _plan_without_mesh(self, run: Run) -> ExecutionPlan:
        """The run's plan without parallelism: the options replace its mesh."""
        mesh = replace(run.mesh, dp_replicate=1, dp_shard=1, tp=1, pp=1, cp=1, ep=1)
        alone = plan_of_run(replace(run, mesh=mesh, data=replace(run.data, micro_batch=1)), 1)
        return replace(alone, gpus=float(self.gpus), micro_batch=float(run.data.micro_batch))

    def search(
        self,
        *,
        also_gpus: str | None = None,
        days: float | None = None,
        precision: str = "bf16",
        graphs: str = "none",
        trainable: bool = False,
        offload: bool = True,
        prices: str | None = None,
    ) -> LayoutSearchResult:
        """Search all plans; `also_gpus` lists more numbers of GPUs. A run that lakh can train implies `trainable`."""
        self._check_precision(precision)
        if days and not self.tokens:
            raise UserError("--days", "needs the length of the run", "give --tokens too")
        counts = tuple(sorted({self.gpus, *(_gpu_counts(also_gpus) if also_gpus else ())}))
        if counts[-1] > self.cluster.gpus:
            raise UserError(f"cluster {self.cluster.name}", f"has {self.cluster.gpus:,} GPUs", "request fewer")
        limits = SearchConstraints(
            batch=self.batch, sequence=self.sequence, gpus=counts, tokens=self.tokens, days=days,
            low_precision=PRECISIONS[precision], cuda_graphs=float(CUDA_GRAPHS.index(graphs)), offload=offload,
            trainable=trainable or (self.run is not None and self.model.is_trainable),
        )  # fmt: skip
        price = cluster_price(self.cluster, prices, free_if_unknown=True)
        found = search(self.model, self.cluster, limits, price.usd)
        return replace(found, hint=self._hint(found, limits))

    def _hint(self, found: LayoutSearchResult, limits: SearchConstraints) -> str | None:
        """A slightly smaller number of GPUs that divides better and is as fast, if there is one."""
        near = _rounder_count(self.gpus)
        if near is None or limits.gpus != (self.gpus,):
            return None
        other = search(self.model, self.cluster, replace(limits, gpus=(near,)))
        if other.best is None or (found.best and other.best["step_s"] > found.best["step_s"]):
            return None
        now = f"takes {found.best['step_s']:.4g} s" if found.best else "has no layout"
        return (
            f"{self.gpus:,} GPUs divide badly: a step {now}, and on {near:,} GPUs it takes "
            f"{other.best['step_s']:.4g} s ({other.best['name']})"
        )

    def estimate_command(self, plan: ExecutionPlan) -> str:
        """The command that estimates a plan of a search, with every option that it does not share with the defaults."""
        words = ["lakh plan estimate", f"--model {self.name} --cluster {self.cluster_name} --gpus {int(plan.gpus)}"]
        words.append(f"--batch {self.batch} --sequence {self.sequence}")
        words += [
            f"--{axis} {int(getattr(plan, axis))}" for axis in ("tp", "pp", "cp", "ep") if getattr(plan, axis) > 1
        ]
        words.append(f"--shard {int(plan.shard)}" if plan.shard > 1 else f"--zero {int(plan.zero)}")
        words.append(f"--micro-batch {int(plan.micro_batch)}")
        if plan.pp > 1:
            words.append(f"--schedule {plan.schedule}" + (f" --chunks {int(plan.chunks)}" if plan.chunks > 1 else ""))
        for option, (field, values) in _CHOICES.items():
            name = next((name for name, value in values.items() if value == getattr(plan, field)), None)
            if option in ("recompute", "graphs", "precision") and name not in (None, "none", "bf16"):
                words.append(f"--{option} {name}")
        for option, field in (
            ("expert-overlap", "expert_overlap"),
            ("offload", "offload"),
            ("stages-inside", "pp_inside"),
        ):
            if getattr(plan, field):
                words.append(f"--{option}")
        return " ".join(words)

    def run_of(self, plan: ExecutionPlan) -> Run:
        """The run that executes this plan; a catalogue model trains on 20 tokens per parameter unless stated."""
        if self.run is not None:
            return run_with_plan(self.run, plan, self.cluster)
        tokens = self.tokens or 20 * float(self.model.parameters)
        return run_of_model(self.name, self.model, plan, self.cluster, tokens=tokens)


def _program_settings(program: str) -> dict[str, Any]:
    """Fields of an ExecutionPlan that are the program's defaults."""
    if program == LAKH or program not in program_names():  # an unknown one is refused with its factor
        return {"zero": 1, "gradient_bytes": 4, "tensor_overlap": 1}
    settings = program_plan(program)
    return settings | {"recompute": RECOMPUTE.index(settings["recompute"])}


def _rounder_count(gpus: int) -> int | None:
    """The number at most 5 % below that has the most factors of two, if it has eight times as many as `gpus`."""
    best = max(range(gpus - int(gpus * 0.05), gpus + 1), key=lambda n: n & -n)
    return best if (best & -best) >= 8 * (gpus & -gpus) and best < gpus and gpus >= 64 else None


def _as_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line as fields of an ExecutionPlan."""
    fields = dict(options)
    for option, (field, values) in _CHOICES.items():
        if option in fields:
            fields[field] = values[fields.pop(option)]
    if "stages_inside" in fields:
        fields["pp_inside"] = fields.pop("stages_inside")
    if "schedule" in fields:
        schedule, chunks = fields.pop("schedule"), fields.get("chunks", 1)
        if (chunks > 1) != (schedule in ("interleaved", "lean")):
            todo = "give --chunks 2 or more" if chunks == 1 else "omit --chunks, or choose interleaved or lean"
            raise UserError(f"--schedule {schedule}", f"has {chunks} chunks per stage", todo)
        fields |= {"zero_bubble": schedule == "zb-h1", "gpipe": schedule == "gpipe"}
        fields["chunks_ahead"] = 1 if schedule == "lean" else 2
    if "zero" in fields:
        if fields.get("shard", 1) > 1:
            raise UserError(f"--zero {fields['zero']}", "needs unsharded weights", "omit --shard, which is ZeRO-3")
        fields["shard"] = 1
    return fields


def _gpu_counts(text: str) -> tuple[int, ...]:
    """ "1024" or "512,1024" as whole numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError("--also-gpus", f"{text!r} is not a list of whole numbers", "write e.g. 512,1024") from None
    if min(found) < 1:
        raise UserError("--also-gpus", f"{text!r} has a number below 1", "give numbers of GPUs")
    return found
