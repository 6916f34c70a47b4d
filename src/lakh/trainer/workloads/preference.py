"""Code language models that learn from pairs of answers (DPO), in the training loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lakh.errors import UserError
from lakh.spec import Run
from lakh.tokens.loading.prefetch import BatchRequest
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.step import Pass
from lakh.trainer.workloads import HeldoutResult
from lakh.trainer.workloads.code import CodeWorkload, TokenSource
from lakh.workloads.code.preference import (
    PreferenceBatch,
    PreferenceBatches,
    ReferenceFile,
    heldout_pairs,
    pair_log_probabilities,
    preference_losses,
)

__all__ = ["PreferenceWorkload"]


class PreferenceWorkload(CodeWorkload):
    def __init__(self, run: Run, world: World, *, uneven: bool = False) -> None:
        super().__init__(run, world, uneven=uneven)
        self._pairs = _PairSource(run)
        self.source = self._pairs

    def build_pass(self, writer: EventWriter) -> Pass:
        beta = self._run.preference.beta

        def run_pass(model: nn.Module, batch: PreferenceBatch, scale: float | Tensor) -> Tensor:
            losses = preference_losses(pair_log_probabilities(model, batch), batch.reference, beta)
            loss = losses.sum() * scale
            loss.backward()
            return loss.detach()

        return run_pass

    @torch.no_grad()
    def evaluate(self, run: Run, model: nn.Module) -> HeldoutResult:
        """Mean loss of held-out pairs; the share and the mean margin of those whose chosen answer gained more."""
        mesh, world, data = self.mesh, self._world, run.data
        model.eval()
        loss = right = margin = count = 0.0
        for batch, counted in heldout_pairs(
            data,
            self._pairs.heldout,
            self._pairs.reference,
            sequences=run.train.eval_sequences,
            data_rank=mesh.data_rank(world.rank),
            data_ranks=mesh.data_ranks,
            device=world.device,
        ):
            found = pair_log_probabilities(model, batch)
            loss += float(preference_losses(found, batch.reference, run.preference.beta)[:counted].double().sum())
            gained = ((found - batch.reference) * run.preference.beta).diff(dim=1)[:counted].double().neg()
            right, margin = right + float((gained > 0).sum()), margin + float(gained.sum())
            count += counted
        loss, right, margin, count = world.sum(loss, right, margin, count)
        model.train()
        if isinstance(model, FSDPModule):
            model.reshard()  # a forward without backward leaves the root unsharded
        count = max(count, 1.0)
        return HeldoutResult(loss / count, round(count), {"accuracy": right / count, "margin": margin / count})


class _PairSource(TokenSource):
    """Pairs as token shards, and the reference's log-probabilities of them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.data, run.model.vocab)
        self.reference = ReferenceFile.read(run.preference.reference)
        if not self.heldout.marks_context:
            found = "holds no pairs of answers, which preference.beta above 0 needs"
            raise UserError("data.tokens", f"{run.data.tokens} {found}", "make them with: lakh tune --method dpo")

    def open(self, request: BatchRequest) -> PreferenceBatches:
        return PreferenceBatches(request, self.reference)
