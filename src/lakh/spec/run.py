"""A Run: all settings of a training run, as one frozen value.

recipe (Python, may compute) -> Run -> run.toml (complete, hashed, stored with the run and each checkpoint) -> `--set`.
`load_run` reads a recipe, a run.toml or a run folder. Values that depend on the number of ranks are methods that take
it, so the same Run is valid on a laptop and on a cluster.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lakh import config
from lakh.errors import ConfigError, InfeasiblePlan, LakhError, UserError
from lakh.spec.cluster import Cluster, load_cluster, shared_file
from lakh.spec.embedding import Recommender
from lakh.spec.mesh import Mesh
from lakh.spec.model import Model

__all__ = ["Adapter", "Checkpoints", "Data", "Optimizer", "Run", "Source", "Training", "load_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    tokens: str
    """Folder or URL of token shards."""
    weight: float = 1.0
    """Its share of the sequences, relative to the other sources."""

    def __post_init__(self) -> None:
        config.require(self, "weight", lambda w: 0 < w < math.inf, "is not a share", "choose a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    tokens: str = "tokens"
    """Folder or URL of token shards from `lakh tokens pack`; evaluation uses its held-out documents."""
    mixture: tuple[Source, ...] = ()
    """Weighted sources to train on instead of `tokens` alone; all with the same tokenizer."""
    sequence: int = 256
    """Tokens in one training sequence."""
    batch: int = 32
    """Sequences in one optimizer step, over all ranks."""
    micro_batch: int = 8
    """Sequences in one forward and backward pass of a rank."""
    prefetch: int = 100
    """Batches that a separate process reads ahead."""
    packing: Literal["concat", "best-fit"] = "concat"
    """How documents become sequences: concatenated and cut, or whole documents packed into padded sequences."""
    document_mask: bool = False
    """Mask attention between documents and restart positions at each one."""
    fim_rate: float = 0.0
    """Share of documents transformed to fill-in-the-middle form on read."""
    fim_spm: float = 0.5
    """Share of these with the suffix first (SPM); the others have the prefix first (PSM)."""
    skip: tuple[tuple[int, int], ...] = ()
    """Sequences that training skips, as [first, end) ranges of the global sequence index."""
    cache: str = "~/.cache/lakh"
    """Cache folder for parts of remote token shards; empty disables the cache."""

    def __post_init__(self) -> None:
        config.require_positive(self, "sequence", "batch", "micro_batch", "prefetch")
        _require_at_most(self, prefetch=10_000)
        config.require(self, ("fim_rate", "fim_spm"), lambda v: 0 <= v <= 1, "is not a share", "choose 0 to 1")
        for first, end in self.skip:
            if not 0 <= first < end < 2**62:
                todo = "give the first sequence and the end (exclusive)"
                raise ConfigError("skip", f"[{first}, {end}] is not a range", todo)
        if len(self.mixture) != len({source.tokens for source in self.mixture}):
            raise ConfigError("mixture", "names a source twice", "list each source once, with its total weight")

    def share_of(self, mesh: Mesh, data_rank: int) -> tuple[int, int]:
        """(first sequence, number of sequences) of a step that a data-parallel rank of a resolved mesh reads.

        The ranks of a replica take equally many micro-batches, because they run their collectives together. Replicas
        differ by at most one micro-batch per rank, after others were lost.
        """
        per_pass = mesh.dp_shard * self.micro_batch
        replica, shard = divmod(data_rank, mesh.dp_shard)
        each, more = divmod(self.batch // per_pass, mesh.dp_replicate)
        rows = (each + (replica < more)) * self.micro_batch
        return (replica * each + min(replica, more)) * per_pass + shard * rows, rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    kind: Literal["adamw", "muon"] = "adamw"
    """Update rule; "muon" orthogonalises the updates of the blocks' matrices and uses AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate, reached at the end of warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after warm-up: cosine or linear decay, constant, or constant then decay (wsd)."""
    decay_share: float = 0.2
    """Share of the steps in the decay phase of "wsd"."""
    min_lr_ratio: float = 0.1
    """The decay ends at this fraction of lr."""
    warmup_steps: int = 20
    """Steps of linear warm-up from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    momentum: float = 0.95
    """Decay of Muon's momentum."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases do not decay."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        _require_finite(self)
        config.require(self, "lr", lambda lr: 0 < lr < 1, "is out of range", "choose a value between 0 and 1")
        config.require(self, "min_lr_ratio", lambda ratio: 0 <= ratio <= 1, "is out of range", "choose 0 to 1")
        config.require(self, "betas", lambda both: all(0 <= b < 1 for b in both), "is out of range", "choose 0 up to 1")
        config.require(self, "momentum", lambda m: 0 <= m < 1, "is out of range", "choose a value from 0 up to 1")
        config.require(self, "decay_share", lambda s: 0 < s <= 1, "is not a share", "choose a value above 0, up to 1")
        config.require_not_negative(self, "warmup_steps", "weight_decay", "clip_norm")
        config.require(self, "eps", lambda eps: eps > 0, "is not positive", "choose e.g. 1e-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    steps: int = 200
    """Optimizer updates in the whole run."""
    precision: Literal["auto", "f32", "bf16"] = "auto"
    """Precision of matrix products; weights and optimizer stay f32. "auto" is bf16 on a GPU and f32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Training device; "auto" uses one GPU per rank if the machine has GPUs."""
    backend: Literal["auto", "gloo", "nccl", "c3"] = "auto"
    """torch.distributed backend; "auto" is nccl on GPUs and gloo on CPUs, "c3" is lakh's own, for CPUs."""
    replica_codec: Literal["none", "bf16", "int8", "int4"] = "none"
    """Compression of gradients between replicas (mesh.dp_replicate) over c3, with error feedback: the rounding error is
    added at the next step (and reset by a resume)."""
    compile: Literal["auto", "none", "block", "model"] = "auto"
    """What torch.compile compiles: nothing, each block, or all blocks as one graph; "auto" is each block on a GPU."""
    attention: Literal["auto", "torch", "flash", "cudnn"] = "auto"
    """Attention kernel; "auto" is the fastest one measured for the device."""
    products: Literal["auto", "library"] = "auto"
    """Has no effect; kept so that older run files load."""
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    """Activation recomputation in the backward pass: none, cheap operations, whole blocks, or what the compiler
    chooses."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs: record and replay the passes of small models; "auto" uses them where a micro-batch is short."""
    fp8: bool = False
    """Compute the blocks' matrix products in fp8: faster from a billion parameters on, with slightly higher loss."""
    fp8_recipe: Literal["tensorwise", "rowwise", "int8_forward", "blockwise"] = "tensorwise"
    """Scales of 8-bit operands: one for each tensor, for each row of a product's operand, or for each 128 numbers of
    it. "rowwise" is the fastest on an H200; "int8_forward" is "rowwise" with 8-bit integers in the forward pass, which
    costs the least loss; "blockwise" rounds outliers best and is slow."""
    num_layers_at_start_in_bf16: int = 0
    """With fp8: the number of first blocks whose products stay in bf16."""
    num_layers_at_end_in_bf16: int = 0
    """With fp8: the number of last blocks whose products stay in bf16. The output head always does."""
    embedding_init_std: float = 0.02
    """Standard deviation of the initial embedding. 1.0, as in torchtitan, keeps the first blocks of a wide model from
    drowning it, which also reduces the effect of fp8 rounding; for untied embeddings."""
    reduce_dtype: Literal["float32", "float64"] = "float32"
    """Type in which gradients of micro-batches and ranks are added. With "float64" the weights are the same, bit for
    bit, on any number of replicas, so also after the loss of some; gradients take twice the bytes."""
    threads: int = 0
    """CPU threads per rank; 0 divides the cores among the ranks of a machine, and uses fewer beside busy processes."""
    eval_every: int = 50
    """Steps between evaluations on held-out documents; 0 evaluates only at the end."""
    eval_sequences: int = 32
    """Held-out sequences in one evaluation."""
    hooks: tuple[str, ...] = ()
    """Functions ("package.module:name") called after each evaluation with (run, step, model); their results are written
    as events."""
    z_loss: float = 0.0
    """Weight of the z-loss (squared log of the softmax denominator), which keeps logits small; usually 1e-4."""
    label_smoothing: float = 0.0
    """Label smoothing: share of a target's weight spread over the vocabulary; held-out losses do not use it."""
    on_spike: Literal["apply", "skip", "rewind"] = "apply"
    """Reaction to a spike: apply the update; skip an update whose gradient norm is too large; or rewind to the last
    checkpoint when the loss jumps and skip the step's sequences. Updates that are not finite are always skipped."""
    spike_factor: float = 4.0
    """A gradient norm, or a rise of the loss, of this many times the usual is a spike."""
    sinks: tuple[Literal["tensorboard", "prometheus", "wandb", "mlflow"], ...] = ()
    """More outputs of the run's events: RUN/tensorboard, a Prometheus endpoint, RUN/wandb (offline), RUN/mlflow."""
    prometheus_port: int = 9108
    """Port of the Prometheus endpoint; 0 takes a free port, written to RUN/prometheus.json."""
    peer_timeout_s: float = 120.0
    """Timeout of a collective: after it a rank gives up on its peers (exit 75)."""

    def __post_init__(self) -> None:
        config.require_positive(self, "steps", "eval_sequences")
        _require_finite(self)
        _require_at_most(self, threads=1024, peer_timeout_s=1e6, eval_sequences=1_000_000)
        config.require_not_negative(self, "eval_every", "threads", "z_loss")
        config.require(self, "embedding_init_std", lambda std: std > 0, "is not positive", "choose e.g. 0.02 or 1")
        config.require_not_negative(self, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        config.require(self, "label_smoothing", lambda s: 0 <= s < 1, "is not a share", "choose 0 up to 1, e.g. 0.1")
        config.require(self, "spike_factor", lambda factor: factor > 1, "is not above 1", "choose e.g. 4")
        config.require(self, "prometheus_port", lambda port: 0 <= port < 65536, "is not a port", "choose 0 to 65535")
        config.require(self, "peer_timeout_s", lambda s: s > 0, "is not positive", "choose e.g. 120")
        for hook in self.hooks:
            if hook.count(":") != 1 or not all(hook.split(":")):
                raise ConfigError("hooks", f"{hook!r} is not a function", 'write "package.module:function"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    every: int = 50
    """Steps between checkpoints; 0 saves only at the end and when stopped."""
    keep: int = 3
    """Number of good checkpoints to keep; older ones are removed after a new one is complete."""
    url: str = ""
    """Where to write checkpoints, such as s3://bucket/run; they go to URL/checkpoints. Empty: the folder of the run."""
    incremental: Literal["off", "exact", "bounded", "factored", "weights"] = "off"
    """Checkpoints between full ones, at most eight in a row: "exact" (bit-exact), "bounded" (about 5 bits
    for weights and first moments, 4 for second moments), "factored" (4 bits, second moments factored), or "weights"
    (bf16 weights alone, which cannot resume)."""
    memory_every: int = 0
    """Steps between copies of the state in memory, on this node and on another one; 0 makes none."""
    background: Literal["auto", "on", "off"] = "auto"
    """Write checkpoints in the background, from a copy of the state in host memory; "auto" does so if the copy fits."""

    def __post_init__(self) -> None:
        config.require_not_negative(self, "every", "memory_every")
        config.require_positive(self, "keep")


NF4_BITS = 4.25
"""Of a weight in 4 bits, with its part of a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Fine-tuning with low-rank adapters (LoRA): a matrix W becomes W + scale * B A, and W stays as it is."""

    rank: int = 0
    """Rank of the adapters' matrices; 0 trains every weight, without adapters."""
    alpha: float = 32.0
    """The adapters' output is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """The adapters' output is multiplied by alpha / sqrt(rank) instead, so that a larger rank does not make it smaller
    (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ()
    """Matrices of a block that get an adapter, such as "q" and "v"; empty: all of them."""
    base_bits: int = 16
    """Bits of a frozen weight in training: 16 or, to save memory, 4 (QLoRA's NormalFloat); merging uses the base as it
    is stored."""
    base_sha256: str = ""
    """Fingerprint of the weights in init_from; other weights are refused. Empty: not checked."""

    def __post_init__(self) -> None:
        config.require_not_negative(self, "rank")
        _require_finite(self)
        _require_at_most(self, rank=4096)
        config.require(self, "base_bits", lambda bits: bits in (4, 16), "is neither 4 nor 16", "choose one of them")
        config.require(self, "alpha", lambda alpha: alpha > 0, "is not positive", "choose e.g. twice the rank")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def state_bytes(self, model: Model) -> int:
        """Bytes of the frozen weights, and of weights, gradients and moments of adapters of every matrix."""
        attention = 2 * (model.width + model.heads * model.head_dim) + 2 * (
            model.width + model.kv_heads * model.head_dim
        )
        per_block = attention + 3 * (model.width + model.ffn)
        base_bytes = 4.0 * model.parameters
        if self.base_bits == 4:
            base_bytes -= (4 - NF4_BITS / 8) * model.layers * (model.attention_weights + model.ffn_weights)
        return int(base_bytes) + 16 * self.rank * model.layers * per_block


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Direct preference optimization (DPO): pairs of a chosen and a rejected answer, from `lakh tune --method dpo`."""

    beta: float = 0.0
    """How strongly the model is kept near the model before training; 0 trains on the next-token loss instead."""
    reference: str = ""
    """File with the log-probabilities that the model before training gives to the answers."""

    def __post_init__(self) -> None:
        _require_finite(self)
        config.require_not_negative(self, "beta")
        if self.beta and not self.reference:
            found = "is empty, and the loss of preference.beta compares with it"
            raise ConfigError("reference", found, "make it with: lakh tune --method dpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    name: str
    """Name of this run."""
    seed: int = 1
    """Seed of the initial weights and of the data order."""
    workload: Literal["code", "dlrm"] = "code"
    """What is trained: "code", the language model of `model`, or "dlrm", the recommendation model of `dlrm`."""
    init_from: str = ""
    """Initial weights: a Hugging Face directory, a GGUF file or a run; empty initialises randomly from the seed."""
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    cluster: Cluster = field(default_factory=lambda: load_cluster("laptop"))
    data: Data = field(default_factory=Data)
    optim: Optimizer = field(default_factory=Optimizer)
    train: Training = field(default_factory=Training)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    adapter: Adapter = field(default_factory=Adapter)
    preference: Preference = field(default_factory=Preference)
    dlrm: Recommender = field(default_factory=Recommender)
    """The recommendation model and its data; without effect on the workload "code"."""

    def __post_init__(self) -> None:
        if not self.name.strip() or "/" in self.name:
            raise ConfigError("name", f"{self.name!r} is not a name", "choose a name without slashes")
        config.require(self, "seed", lambda seed: 0 <= seed < 2**63, "is out of range", "choose 0 up to 2**63 - 1")
        data, cp, warmup, steps = self.data, self.mesh.cp, self.optim.warmup_steps, self.train.steps
        if data.sequence > self.model.context:
            found = f"{data.sequence} is longer than model.context {self.model.context}"
            raise ConfigError("data.sequence", found, "shorten the sequence or increase the context")
        if data.batch % data.micro_batch:
            found = f"{data.micro_batch} does not divide data.batch {data.batch}"
            raise ConfigError("data.micro_batch", found, "choose a divisor of the batch")
        if warmup > steps:
            found = f"{warmup} is more than train.steps {steps}"
            raise ConfigError("optim.warmup_steps", found, "warm up for fewer steps")
        if self.model.tied and self.train.embedding_init_std > 0.1:
            found = f"{self.train.embedding_init_std:g} is too large for the output head, which model.tied shares"
            raise ConfigError("train.embedding_init_std", found, "choose 0.02, or set model.tied = false")
        if self.adapter.rank and not self.init_from:
            raise ConfigError("init_from", "is empty, and adapters need a base model", "name the model to fine-tune")
        if data.sequence % (2 * cp) and cp > 1:
            found = f"2 x {cp} does not divide data.sequence {data.sequence}"
            raise InfeasiblePlan("mesh.cp", found, "choose another")
        self.mesh.check(self.model)
        if self.preference.beta:
            self._check_preference()
        if self.workload == "dlrm":
            self._check_recommender()

    def _check_preference(self) -> None:
        data = self.data
        if data.sequence % 2 or data.packing != "best-fit" or data.document_mask or data.fim_rate:
            found = "a pair is a sequence of two halves, packed best-fit, without document masks and fill-in-the-middle"
            raise ConfigError("preference.beta", found, "make the run with: lakh tune --method dpo")
        if self.adapter.rank and self.adapter.base_bits != 16:
            found = f"is {self.adapter.base_bits}, and the model before training is compared in full precision"
            raise ConfigError("adapter.base_bits", found, "set it to 16")

    def _check_recommender(self) -> None:
        if not self.dlrm.tables:
            raise ConfigError("dlrm.tables", "is empty", "name the tables, as recipes/dlrm.py does")
        if self.data.sequence != 1:
            found = f"is {self.data.sequence}, and a sample of a recommendation model is one position"
            raise ConfigError("data.sequence", found, "set it to 1")
        if self.optim.kind != "adamw":
            found = f"is {self.optim.kind}, and the network of a recommendation model has no blocks"
            raise ConfigError("optim.kind", found, "set it to adamw")
        if self.init_from or self.adapter.rank:
            raise ConfigError("init_from", "recommendation models start from random weights", "leave it empty")

    @property
    def parameters(self) -> int:
        return self.dlrm.parameters if self.workload == "dlrm" else self.model.parameters

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch * self.data.sequence

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.train.steps

    @property
    def flops(self) -> float:
        """Training FLOPs of the whole run, causal-exact."""
        return self.tokens * self.flops_per_token

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs of one token, without those of adapters; frozen weights have no gradient."""
        if self.workload == "dlrm":
            return self.dlrm.flops_per_sample
        return self.model.flops_per_token(self.data.sequence, frozen=self.adapter.rank > 0)

    def accumulation(self, world: int, *, uneven: bool = False) -> int:
        """Gradient accumulation: micro-batches of each rank in one step, on `world` ranks.

        `uneven`: replicas may differ by one micro-batch (`Data.share_of`), and this is the largest number.
        """
        mesh, batch, micro_batch = self.mesh.resolve(world), self.data.batch, self.data.micro_batch
        ranks = mesh.data_ranks
        per_pass = ranks * micro_batch
        is_uneven = (
            uneven
            and self.workload == "code"
            and mesh.pp == 1
            and batch >= per_pass
            and not batch % (mesh.dp_shard * micro_batch)
        )
        if is_uneven:
            return -(-batch // per_pass)
        if batch % per_pass:
            found = f"{batch} sequences cannot be split over {ranks} data-parallel ranks x micro_batch {micro_batch}"
            raise InfeasiblePlan("data.batch", found, f"choose a multiple of {per_pass}, or another micro_batch")
        return batch // per_pass

    def memory_bytes(self, world: int) -> dict[str, int]:
        """First estimate of the bytes on one rank: sharded states and the activations of one micro-batch."""
        mesh = self.mesh.resolve(world)
        shards = mesh.dp_shard * mesh.cp * mesh.tp * mesh.pp
        bf16 = self.train.precision == "bf16"
        tokens = self.data.micro_batch * self.data.sequence // mesh.cp
        activations = self.model.activation_bytes(tokens, dtype_bytes=2 if bf16 else 4) // (mesh.tp * mesh.pp)
        states = self.adapter.state_bytes(self.model) if self.adapter.rank else self.model.state_bytes()
        return {"states": -(-states // shards), "activations": activations}


def _require_finite(settings: Any) -> None:
    """Refuse NaN and infinity, which pass comparisons."""
    floats = [f.name for f in fields(settings) if isinstance(getattr(settings, f.name), float)]
    config.require(settings, floats, math.isfinite, "is not a finite number", "choose a finite number")


def _require_at_most(settings: Any, **limits: float) -> None:
    for name, limit in limits.items():
        config.require(settings, name, partial(operator.ge, limit), "is too large", f"choose {limit:g} or less")


def load_run(source: str | Path, sets: Sequence[str] = ()) -> Run:
    """Read a Run from run.toml, from a run's folder, or from a recipe (`file.py` or `file.py:function`)."""
    text = str(source)
    if Path(text).is_dir():
        text = str(Path(text) / "run.toml")
        if not Path(text).exists():
            raise UserError(str(source), "has no run.toml", "give a run's folder, a run.toml or a recipe")
    if text.endswith(".toml"):
        return config.load(Run, text, sets)
    file, _, function = text.partition(":")
    path = shared_file("recipes", file, ".py")
    if path.suffix != ".py":
        raise UserError(text, "is neither a recipe (.py) nor a run (.toml)", "give one of these")
    return config.with_sets(_call_recipe(path, file, function), sets, origin=path.name)


def _call_recipe(path: Path, typed: str, function: str) -> Run:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"lakh_recipe_{path.stem}", path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        result = _recipe_function(typed, module, function)()
    except (ConfigError, InfeasiblePlan) as error:
        raise type(error)(f"{error.where} ({path.name})", error.found, error.todo) from None
    except LakhError:
        raise
    except Exception as error:  # a recipe is the user's code
        lines = [entry.lineno for entry in inspect.trace() if entry.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise UserError(where, f"{type(error).__name__}: {error}", "fix the recipe") from error
    if not isinstance(result, Run):
        raise UserError(str(path), f"returned {type(result).__name__}", "a recipe returns a lakh.spec.Run")
    return result


def _recipe_function(typed: str, module: Any, name: str) -> Callable[[], Any]:
    functions = inspect.getmembers_static(module, inspect.isfunction)
    own = {key: value for key, value in functions if value.__module__ == module.__name__ and not key.startswith("_")}
    if name:
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1)
            todo = f"did you mean {typed}:{near[0]}?" if near else f"choose one of: {', '.join(own) or 'none there'}"
            raise UserError(f"{typed}:{name}", "no such recipe", todo)
        return own[name]
    if len(own) != 1:
        choices = ", ".join(f"{typed}:{key}" for key in own)
        raise UserError(typed, f"holds {len(own)} recipes", f"name one: {choices or 'none found'}")
    return next(iter(own.values()))
