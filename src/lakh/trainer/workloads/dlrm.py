"""Recommendation models in the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lakh.checkpoint.slices import TensorSlice
from lakh.errors import UserError
from lakh.events import Event
from lakh.spec import Data, Run
from lakh.spec.parallel_check import check_parallelism
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import BatchRequest
from lakh.tokens.loading.skips import SkipRanges
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.trainer.step import Pass
from lakh.trainer.workloads import DataSource, HeldoutResult
from lakh.workloads.dlrm.auc import area_under_curve
from lakh.workloads.dlrm.batch import ClickBatch
from lakh.workloads.dlrm.data import ClickBatches, heldout_batches
from lakh.workloads.dlrm.loss import click_loss
from lakh.workloads.dlrm.model import ClickModel
from lakh.workloads.dlrm.parallel import build_exchange, build_model
from lakh.workloads.dlrm.samples import ClickRequest, digest_samples, open_samples
from lakh.workloads.dlrm.sharding.exchange import TableExchange
from lakh.workloads.dlrm.sharding.tables import ShardedTables

__all__ = ["DlrmWorkload"]

LOOKAHEAD_STEPS = 2


class DlrmWorkload:
    def __init__(self, run: Run, world: World) -> None:
        if world.device.type not in ("cpu", "cuda"):
            raise UserError("train.device", f"is {world.device}, which has no kernels for tables", "set it to cpu")
        self._run, self._world = run, world
        self.mesh = check_parallelism(run, world.size)
        self._exchange = build_exchange(run, world.rank, world.size)
        self._split = open_samples(run.dlrm, run.seed)
        self._writer: EventWriter | None = None
        self.source: DataSource = _ClickSource(run, self._exchange, self._write)

    def build_model(self, writer: EventWriter, *, is_new: bool) -> nn.Module:
        return build_model(self._run, self._exchange, self._world.device)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for the network; its step also updates the tables, or drops their gradients if it is not applied."""
        tables, ratio = _tables_of(model), self._run.dlrm.lr / self._run.optim.lr

        def step_tables(optimizer: torch.optim.Optimizer, *_: object) -> None:
            found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
            if found_inf is not None and bool(found_inf):
                tables.discard()
            else:
                tables.step(optimizer.param_groups[0]["lr"] * ratio)

        optimizer = build_optimizer(model, self._run.optim)
        optimizer.register_step_post_hook(step_tables)
        return optimizer

    def build_pass(self, writer: EventWriter) -> Pass:
        self._writer = writer

        def run_pass(model: nn.Module, batch: ClickBatch, scale: float | Tensor) -> Tensor:
            loss = click_loss(model(batch), batch, scale)
            loss.backward()
            return loss.detach()

        return run_pass

    def _write(self, event: Event) -> None:
        if self._writer is not None:
            self._writer.write(event)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | TensorSlice]:
        tensors: dict[str, Tensor | TensorSlice] = dict(named_state(model, optimizer))
        tables = _tables_of(model)
        for (table, kind), (part, writes) in tables.held_tensors().items():
            name = f"model.tables.{table}" if kind == "weights" else f"optim.tables.{table}.{kind}"
            tensors[name] = TensorSlice(part.shape, part.offset, part.local, writes=writes)
        tensors["optim.tables.steps"] = tables.steps
        return tensors

    @torch.no_grad()
    def evaluate(self, run: Run, model: nn.Module) -> HeldoutResult:
        """Loss and AUC on the validation samples, AUC on the test samples, and the bytes on the network per step."""
        model.eval()
        count, loss, auc = self._measure(run, model, "validation")
        _, _, test_auc = self._measure(run, model, "test")
        model.train()
        hits, misses = self._world.sum(*map(float, _tables_of(model).cache_counts))
        cached = {"cache_hit_rate": hits / (hits + misses)} if hits + misses else {}
        return HeldoutResult(loss, count, {"auc": auc, "test_auc": test_auc, **self._traffic(), **cached})

    def _traffic(self) -> dict[str, float]:
        """Bytes that all ranks send in a step, and the seconds of this rank's input distribution."""
        exchange = self._exchange
        if exchange.ranks == 1 or not exchange.steps:
            return {}
        names = ("ids", "forward", "backward", "dense")
        sent = [float(exchange.sent.total[name]) for name in names]
        outside = [float(exchange.sent.between_nodes[name]) for name in names]
        *totals, between = self._world.sum(*sent, sum(outside))
        per_step = {f"{name}_bytes": total / exchange.steps for name, total in zip(names, totals, strict=True)}
        if exchange.layout.node_size < exchange.ranks:
            per_step["between_nodes_bytes"] = between / exchange.steps
        return {**per_step, "input_s": exchange.input_s / exchange.steps}

    def _measure(self, run: Run, model: nn.Module, part: str) -> tuple[int, float, float]:
        """(samples, mean loss, AUC), the same on every rank."""
        logits, labels, total = [], [], 0.0
        size = run.data.micro_batch
        for batch, counted in heldout_batches(
            self._split, part, samples=run.train.eval_sequences, micro_batch=size, exchange=self._exchange
        ):
            batch = batch.to(self._world.device)
            logits_B = model(batch)
            losses_B = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B, reduction="none")
            total += float(losses_B[:counted].double().sum())
            logits.append(logits_B[:counted])
            labels.append(batch.labels_B[:counted])
        loss, count = self._world.sum(total, float(sum(map(len, labels))))
        gathered = self._world.gather((torch.cat(logits).cpu().numpy(), torch.cat(labels).cpu().numpy()))
        auc = None
        if gathered is not None:
            scores, clicked = (torch.from_numpy(np.concatenate(values)) for values in zip(*gathered, strict=True))
            auc = area_under_curve(scores, clicked)
        return round(count), loss / count, self._world.broadcast(auc)


class _ClickSource:
    """The data set of a run."""

    setting = "dlrm.dataset"

    def __init__(self, run: Run, exchange: TableExchange, write: Callable[[Event], None]) -> None:
        self._run, self._exchange, self._write = run, exchange, write
        self._split = open_samples(run.dlrm, run.seed)
        self.url, self.fingerprint = run.dlrm.dataset, self._split.clicks.fingerprint
        self._timeout_s = run.train.peer_timeout_s
        is_cached = any(tier != "device" for tier in exchange.layout.tiers.values())
        self._ahead = LOOKAHEAD_STEPS if is_cached and run.dlrm.memory.cache_policy == "lookahead" else 0
        # Of the thread that distributes ids; torch gives a new group 30 minutes.
        self._group = None
        if exchange.ranks > 1:
            backend = "gloo" if dist.get_backend() == "nccl" else None  # ids are in host memory
            self._group = dist.new_group(timeout=timedelta(seconds=self._timeout_s), backend=backend)

    def open(self, request: BatchRequest) -> ClickBatches:
        asked = ClickRequest(**{name: getattr(request, name) for name in _REQUEST_FIELDS}, settings=self._run.dlrm)
        return ClickBatches(
            asked,
            self._exchange,
            self._group,
            timeout_s=self._timeout_s,
            ahead=self._ahead,
            on_distributed=self._write if self._exchange.ranks > 1 else None,
        )

    def digest(self, data: Data, seed: int, first: int, count: int) -> StreamDigest:
        return digest_samples(first, self._split.training_numbers(SkipRanges(data.skip), seed, first, count))

    def attachments(self) -> Mapping[str, bytes]:
        return {}


_REQUEST_FIELDS = tuple(BatchRequest.__dataclass_fields__)


def _tables_of(model: nn.Module) -> ShardedTables:
    return cast(ShardedTables, cast(ClickModel, model).tables)
