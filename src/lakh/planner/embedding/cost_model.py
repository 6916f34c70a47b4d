"""The time and memory of a sharded table, from bytes and bandwidths.

The formulas are those of TorchRec's planner (torchrec/distributed/planner/estimator, BSD-3): bytes read and written
over the bandwidth of the memory, pooled outputs over the bandwidth of the network, and factors that its authors
measured. The preset "torchrec" has its constants too, so that plans can be compared with TorchRec's; "cluster" takes
the bandwidths of a cluster file. Both are estimates: nothing here was fitted to measurements of lakh.

P ranks in nodes of L, B samples per rank, w columns, i = B * features * pooling ids and o = B * features * min(1,
pooling) bags per rank:

    kind            ids read  values read    outputs  forward                   backward
    table, column   iP        iP max(w,32)   oP w     all-to-all                all-to-all
    row             i         i w            oP w     reduce-scatter            all-gather, batched copy
    table-row       iP/L      iP/L w         oP w     reduce-scatter in a node, all-to-all between nodes; and back
    data            i         i w            o w      none                      all-reduce of the table, dense update
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.planner.embedding.options import ShardingLimits, ShardingOption, column_slices, uneven_slices
from lakh.spec.cluster import Cluster
from lakh.spec.embedding import EmbeddingTable, MemoryTier, ShardingKind

__all__ = ["COST_MODELS", "BandwidthCosts", "MemorySizes", "cost_model", "slice_counts", "width_penalty"]

COST_MODELS = ("cluster", "torchrec")

ID_BYTES = 8
COMM_BYTES = 4  # f32 outputs and gradients
BACKWARD = 2.0  # times the forward lookup: TorchRec's BWD_COMPUTE_MULTIPLIER
BATCHED_COPY = 2.455  # TorchRec: copies after the all-gather of row-wise gradients
DENSE_UPDATE = 9.22  # TorchRec: elementwise kernels of a dense optimizer
DENSE_KERNEL = 0.5  # TorchRec: share of the bandwidth that a data-parallel (dense) kernel reaches
MIN_LOOKUP_WIDTH = 32  # narrower rows cost as much to read
FILE_Bps = 100 * 2**20  # TorchRec's SSD_MEM_BW: random rows from a solid-state disk
HOST_Bps = 32 * 2**30  # TorchRec's HBM_TO_DDR_MEM_BW: 16 lanes of PCIe 4
UNCACHED_HOST = 0.1  # TorchRec: share of it that row reads over PCIe reach


def width_penalty(width: int) -> float:
    """TorchRec's factor for rows that fill half or a quarter of a thread block of 32 threads x 4 values."""
    return 1.0 if width >= 128 else 1.15 if width >= 64 else 1.75


def slice_counts(width: int, min_width: int) -> list[int]:
    """Numbers of column-wise slices to consider: all up to 16, then doubling, while slices keep the least width."""
    most = max(1, width // max(min_width, 4))
    counts = [*range(1, min(most, 16) + 1)]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes for tables on one rank, by tier."""

    device: float
    host: float = 0.0
    file: float = 0.0


@dataclass(frozen=True, slots=True)
class BandwidthCosts:
    name: str
    limits: ShardingLimits
    batch: int
    """Samples per rank and step."""
    tier_Bps: dict[MemoryTier, float]
    node_Bps: float
    """Between the ranks of a node."""
    network_Bps: float
    """Between all ranks."""
    all_reduce_Bps: float

    def options(self, table: EmbeddingTable) -> list[ShardingOption]:
        """Every way to shard the table whose pieces fit into the memory of one rank."""
        found: list[ShardingOption] = []
        for tier in self.tier_Bps:
            if not self.limits.tier_bytes.get(tier):
                continue
            found += [self._columns(table, tier, widths) for widths in self._splits(table)]
            found.append(self._rows(table, tier))
            if 1 < self.limits.node_size < self.limits.ranks:
                found.append(self._rows_of_node(table, tier))
            if tier == "device":
                found.append(self._copies(table))
            fitting = [option for option in found if max(option.slice_bytes) <= self.limits.tier_bytes[option.tier]]
            if fitting:  # a slower tier never helps a table that fits into a faster one on its own
                return fitting
        return []

    def slower_options(self, table: EmbeddingTable) -> list[ShardingOption]:
        """Options of the tiers below the device, for sets that together do not fit into it."""
        found = []
        for tier in self.tier_Bps:
            if tier != "device" and self.limits.tier_bytes.get(tier):
                found += [self._columns(table, tier, widths) for widths in self._splits(table)]
                found.append(self._rows(table, tier))
                if 1 < self.limits.node_size < self.limits.ranks:
                    found.append(self._rows_of_node(table, tier))
        return [option for option in found if max(option.slice_bytes) <= self.limits.tier_bytes[option.tier]]

    # --- one kind each ------------------------------------------------------------------------------------------------

    def _splits(self, table: EmbeddingTable) -> list[tuple[int, ...]]:
        """Widths of the slices of every column-wise split to consider, the whole table first."""
        counts = slice_counts(table.width, self.limits.min_width)
        equal = [column_slices(table.width, count) for count in counts]
        return equal + [widths for widths in uneven_slices(table.width, self.limits.min_width) if widths not in equal]

    def _columns(self, table: EmbeddingTable, tier: MemoryTier, widths: tuple[int, ...]) -> ShardingOption:
        ranks, bandwidth = self.limits.ranks, self.tier_Bps[tier]
        ids, bags = self._inputs(table) * ranks, self._outputs(table) * ranks
        times, sizes = [], []
        for width in widths:
            output = bags * width * COMM_BYTES
            lookup = ids * max(width, MIN_LOOKUP_WIDTH) * table.value_bytes
            compute_s = (ids * ID_BYTES + lookup + output) * width_penalty(width) / bandwidth * (1 + BACKWARD)
            times.append(1e3 * (compute_s + 2 * output / self.network_Bps))
            sizes.append(int(table.bytes_of(table.rows, width) + ids * ID_BYTES + output))
        kind: ShardingKind = "column-wise" if len(widths) > 1 else "table-wise"
        return ShardingOption(kind, tier, widths, tuple(times), tuple(sizes), "rank")

    def _rows(self, table: EmbeddingTable, tier: MemoryTier) -> ShardingOption:
        ranks, bandwidth = self.limits.ranks, self.tier_Bps[tier]
        ids, output = self._inputs(table), self._outputs(table) * ranks * table.width * COMM_BYTES
        read = ids * (ID_BYTES + table.width * table.value_bytes) + output
        seconds = read / bandwidth * (1 + BACKWARD) + 2 * output / self.network_Bps + output * BATCHED_COPY / bandwidth
        size = table.bytes_of(-(-table.rows // ranks), table.width) + ids * ID_BYTES + output
        return ShardingOption("row-wise", tier, (table.width,), (1e3 * seconds,), (int(size),), "all")

    def _rows_of_node(self, table: EmbeddingTable, tier: MemoryTier) -> ShardingOption:
        ranks, node, bandwidth = self.limits.ranks, self.limits.node_size, self.tier_Bps[tier]
        ids, output = self._inputs(table) * ranks / node, self._outputs(table) * ranks * table.width * COMM_BYTES
        between = self._outputs(table) * (ranks // node) * table.width * COMM_BYTES
        read = ids * (ID_BYTES + table.width * table.value_bytes) + output
        seconds = read / bandwidth * (1 + BACKWARD) + output * BATCHED_COPY / bandwidth
        seconds += 2 * output / self.node_Bps + 2 * between / self.network_Bps
        size = table.bytes_of(-(-table.rows // node), table.width) + ids * ID_BYTES + output
        return ShardingOption("table-row-wise", tier, (table.width,), (1e3 * seconds,), (int(size),), "node")

    def _copies(self, table: EmbeddingTable) -> ShardingOption:
        ranks, node, bandwidth = self.limits.ranks, self.limits.node_size, self.tier_Bps["device"] * DENSE_KERNEL
        ids, output = self._inputs(table), self._outputs(table) * table.width * table.value_bytes
        weights = table.rows * table.width * table.value_bytes
        nodes = min(ranks / node, 2)
        reduce_s = weights * (2 * nodes - 1) / nodes / self.all_reduce_Bps * (2 if ranks > 2 * node else 1)
        lookup_s = (ids * (ID_BYTES + table.width * table.value_bytes) + output) / bandwidth * (1 + BACKWARD)
        seconds = lookup_s + reduce_s + weights * DENSE_UPDATE / bandwidth
        size = (
            table.bytes_of(table.rows, table.width) + weights + ids * ID_BYTES + output
        )  # weights: the dense gradient
        return ShardingOption("data-parallel", "device", (table.width,), (1e3 * seconds,), (int(size),), "all")

    def _inputs(self, table: EmbeddingTable) -> float:
        return self.batch * table.features * table.pooling

    def _outputs(self, table: EmbeddingTable) -> float:
        return self.batch * table.features * min(1.0, table.pooling)


def cost_model(
    name: str, cluster: Cluster, ranks: int, *, batch: int, min_width: int, memory: MemorySizes
) -> BandwidthCosts:
    """The cost model of that name for the first `ranks` GPUs of a cluster."""
    node = min(cluster.node_size, ranks)
    sizes: dict[MemoryTier, float] = {"device": memory.device, "host": memory.host, "file": memory.file}
    limits = ShardingLimits(ranks, node, sizes, min_width)
    if name == "torchrec":  # its constants: a V100's memory, NVLink, 100 Gb/s per GPU between nodes
        device, inside, outside = 897.0 * 2**30, 600.0 * 2**30, 12.5 * 2**30
        all_reduce = outside * node
    else:
        device, inside = cluster.gpu.memory_Bps, cluster.tiers[0].bandwidth_Bps
        outside = cluster.tier_of(ranks).bandwidth_Bps
        all_reduce = outside
    return BandwidthCosts(
        name=name,
        limits=limits,
        batch=batch,
        tier_Bps={"device": device, "host": HOST_Bps * UNCACHED_HOST, "file": FILE_Bps},
        node_Bps=inside,
        network_Bps=inside if ranks <= node else outside,
        all_reduce_Bps=all_reduce,
    )
