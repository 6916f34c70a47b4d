"""Code language models in the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lakh import storage
from lakh.checkpoint.slices import TensorSlice
from lakh.spec import Data, Run
from lakh.spec.parallel_check import check_parallelism
from lakh.tokens.loading.digest import StreamDigest, digest_sequences
from lakh.tokens.loading.prefetch import BatchRequest, prepare_reader
from lakh.tokens.loading.stream import TokenStream, open_data
from lakh.trainer.initial_weights import model_builder
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.trainer.step import Pass, loss_sum, objective_of, plain_pass, uses_bf16
from lakh.trainer.tuning.cuda_graphs import GraphedPass, decide_cuda_graphs
from lakh.trainer.workloads import DataSource, HeldoutResult
from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.data import Batches, heldout_batches
from lakh.workloads.code.parallel import parallelise

__all__ = ["CodeWorkload", "TokenSource"]


class CodeWorkload:
    def __init__(self, run: Run, world: World, *, uneven: bool = False) -> None:
        self._run, self._world = run, world
        self.mesh = check_parallelism(run, world.size, uneven=uneven)
        self._tokens = TokenSource(run.data, run.model.vocab)
        self.source: DataSource = self._tokens

    def build_model(self, writer: EventWriter, *, is_new: bool) -> nn.Module:
        run, mesh, world = self._run, self.mesh, self._world
        groups = world.groups(mesh, run.train.peer_timeout_s)
        model = parallelise(
            run,
            mesh,
            groups,
            model_builder(run, is_new=is_new),
            bf16=uses_bf16(run.train, world.device),
            device=world.device,
            on_choice=lambda choice: writer.auto_choice(*choice),
        )
        if run.train.replica_codec != "none" and groups.fsdp is not None and mesh.dp_replicate > 1:
            from lakh.c3.torch.hsdp import encode_replicas

            encode_replicas(model, groups.fsdp.get_group("dp_replicate"), run.train.replica_codec)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self._run.optim)

    def build_pass(self, writer: EventWriter) -> Pass:
        run = self._run
        enabled, reason = decide_cuda_graphs(
            run.train,
            run.data,
            run.model,
            device=self._world.device.type,
            world=self._world.size,
            adapted=run.adapter.rank > 0,
        )
        writer.auto_choice("graphs", "recorded" if enabled else "none", reason)
        plain = plain_pass(objective_of(run.train))
        return GraphedPass(plain) if enabled else plain

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | TensorSlice]:
        return dict(named_state(model, optimizer))

    @torch.no_grad()
    def evaluate(self, run: Run, model: nn.Module) -> HeldoutResult:
        """Mean loss on held-out documents, in nats per token."""
        mesh, world, data = self.mesh, self._world, run.data
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        count = num_targets_here = 0
        for batch, counted in heldout_batches(
            data,
            self._tokens.heldout,
            sequences=run.train.eval_sequences,
            data_rank=mesh.data_rank(world.rank),
            data_ranks=mesh.data_ranks,
            device=world.device,
        ):
            targets = batch.targets.clone()  # inputs and targets are views of the same tensor
            targets[counted:] = IGNORED  # repeated sequences that give every rank the same number of batches
            total += loss_sum(model, dataclasses.replace(batch, targets=targets))
            count += counted * data.sequence
            num_targets_here += int((targets != IGNORED).sum())
        loss_total, positions, num_targets = world.sum(float(total), float(count), float(num_targets_here))
        model.train()
        if isinstance(model, FSDPModule):
            model.reshard()  # a forward without backward leaves the root unsharded
        # All ranks that share a sequence have counted it; in a pipeline only the last stage has its loss.
        return HeldoutResult(
            loss=loss_total * mesh.pp / max(1.0, num_targets),
            sequences=round(positions / data.sequence * mesh.data_ranks / world.size),
        )


class TokenSource:
    """Token shards, checked against the model's vocabulary."""

    setting = "data.tokens"

    def __init__(self, data: Data, vocab: int) -> None:
        prepare_reader()
        opened = open_data(data, vocab)
        self.url, self.fingerprint, self.heldout = data.tokens, opened.fingerprint, opened.heldout
        self._tokenizer_path = opened.tokenizer_path

    def open(self, request: BatchRequest) -> Batches:
        return Batches(request)

    def digest(self, data: Data, seed: int, first: int, count: int) -> StreamDigest:
        batch = TokenStream(data, seed).read_range(first, count)
        return digest_sequences(first, batch.tokens, batch.lengths)

    def attachments(self) -> Mapping[str, bytes]:
        return {"tokenizer.json": storage.read_bytes(self._tokenizer_path)}
