"""A cluster: one kind of GPU in nested network tiers, as data with units in the names and a source for each number.

    [gpu]      what one accelerator can do
    [[tiers]]  from the innermost (a node) outwards; `size` counts the GPUs of one group of that tier

Bandwidth is per GPU and direction; oversubscription k means that only 1/k of it is left when all GPUs of a tier
talk across it at once. Files lie in clusters/; a bare name such as "laptop" finds the one of that name.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from lakh import config
from lakh.errors import ConfigError, UserError

__all__ = ["Cluster", "Gpu", "Tier", "load_cluster", "shared_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    kind: str
    """Name of the part, e.g. "H100-SXM"; "cpu" for a machine without a GPU."""
    memory_GiB: float
    """Memory of one accelerator."""
    dense_bf16_TFLOPs: float
    """Peak of dense bf16 matrix products: what MFU is measured against, never the sparse figure."""
    memory_bandwidth_GBps: float
    """Peak bandwidth of its memory."""
    source: str
    """Where these numbers come from."""
    power_W: float | None = None
    """Board power of one accelerator, for plans of power and cost."""

    def __post_init__(self) -> None:
        for name in ("memory_GiB", "dense_bf16_TFLOPs", "memory_bandwidth_GBps"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", "give the data-sheet value")
        if not self.source.strip():
            raise ConfigError("source", "is empty", "say where the numbers come from")
        if self.power_W is not None and self.power_W <= 0:
            raise ConfigError(
                "power_W", f"{self.power_W} is not positive", "give the data-sheet value, or leave it out"
            )
        dense = next((peak for kind, peak in DENSE_PEAKS if self.kind.upper().startswith(kind)), None)
        if dense is not None and self.dense_bf16_TFLOPs > 1.1 * dense:
            raise ConfigError(
                "dense_bf16_TFLOPs",
                f"{self.dense_bf16_TFLOPs:g} is more than a {self.kind} can do in dense bf16 ({dense:g}): "
                "data sheets print the figure with sparsity, or that of fp8",
                f"give the dense figure, {dense:g}",
            )


# Dense bf16 TFLOP/s by NVIDIA's data sheets, which print twice as much ("with sparsity") from the A100 on.
DENSE_PEAKS = (
    ("A100", 312.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("H800", 989.4),
    ("GB200", 2500.0),
    ("GB300", 2500.0),
    ("B200", 2250.0),
    ("B300", 2250.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    name: str
    """node, rack, zone, building, ..."""
    size: int
    """GPUs in one group of this tier."""
    bandwidth_GBps: float
    """Per GPU and direction, between GPUs of the same group."""
    latency_us: float
    """One way, for an empty message."""
    oversubscription: float = 1.0
    """1 is full bisection; 7 leaves a seventh when everybody talks across this tier."""
    source: str = ""
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("size", f"{self.size} GPUs", "choose 1 or more")
        if self.bandwidth_GBps <= 0 or self.latency_us < 0:
            raise ConfigError("bandwidth_GBps", "bandwidth must be above 0 and latency_us 0 or more", "mend them")
        if self.oversubscription < 1:
            raise ConfigError("oversubscription", f"{self.oversubscription} is below 1", "1 means full bisection")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    name: str
    """What people call it."""
    gpu: Gpu
    tiers: tuple[Tier, ...]
    """Network tiers from the innermost outwards."""
    storage_read_GBps: float | None = None
    """What storage delivers to all GPUs together, for plans of data and checkpoints."""
    storage_write_GBps: float | None = None
    """What storage takes from all GPUs together."""

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ConfigError("tiers", "there is none", "describe at least the node as [[tiers]]")
        for name in ("storage_read_GBps", "storage_write_GBps"):
            if (rate := getattr(self, name)) is not None and rate <= 0:
                raise ConfigError(name, f"{rate} is not positive", "give a rate, or leave it out")
        for inner, outer in zip(self.tiers, self.tiers[1:], strict=False):
            if outer.size % inner.size or outer.size <= inner.size:
                raise ConfigError(
                    "tiers",
                    f"{outer.name} of {outer.size} GPUs is not made of whole groups of {inner.name} ({inner.size})",
                    "list tiers from the smallest to the largest, each a multiple of the one before",
                )

    @property
    def gpus(self) -> int:
        return self.tiers[-1].size

    @property
    def node_size(self) -> int:
        return self.tiers[0].size

    def tier_of(self, ranks: int) -> Tier:
        """The innermost tier that holds `ranks` neighbouring GPUs."""
        for tier in self.tiers:
            if ranks <= tier.size:
                return tier
        raise UserError(f"cluster {self.name}", f"has {self.gpus} GPUs and {ranks} are asked for", "ask for fewer")


def load_cluster(name: str | Path) -> Cluster:
    """Read clusters/NAME.toml, or the file of that path."""
    return config.load(Cluster, shared_file("clusters", str(name), ".toml"))


def shared_file(folder: str, name: str, suffix: str) -> Path:
    """A file that the user names by its path, or by its bare name when it ships with lakh (clusters, recipes)."""
    if Path(name).exists():
        return Path(name)
    if Path(name).name == name:
        bare = name.removesuffix(suffix)
        for base in _shared_folders():
            path = base / folder / f"{bare}{suffix}"
            if path.exists():
                return path
        known = sorted({p.stem for base in _shared_folders() for p in (base / folder).glob(f"*{suffix}")})
        near = difflib.get_close_matches(bare, known, n=1)
        todo = f"give a path, or one of: {', '.join(known)}" if known else "give a path"
        raise UserError(f"{folder}/{bare}{suffix}", "no such file", f"did you mean {near[0]}?" if near else todo)
    raise UserError(name, "no such file", "check the path")


def _shared_folders() -> list[Path]:
    """Where clusters/ and recipes/ lie: the checkout that we run from, or beside the installed package."""
    package = Path(__file__).resolve().parents[1]
    return [package.parents[1], package / "share"]
