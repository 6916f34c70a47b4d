"""A small training job with a state worth saving: a code model on the bytes of Python's standard library.

Text, model and order are fixed by a seed, so that a resumed job differs from another only by what was restored.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lakh.spec import Model, Optimizer
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.step import loss_sum, update
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights

__all__ = ["JobSettings", "TrainingJob", "standard_library"]

HELDOUT_BYTES = 1 << 20
HELDOUT_BATCHES = 24
OPTIM = Optimizer(lr=1e-3, warmup_steps=20, schedule="cosine")


@dataclass(frozen=True)
class JobSettings:
    width: int
    layers: int
    sequence: int
    batch: int
    total_steps: int
    device: str

    @property
    def model(self) -> Model:
        return Model(
            layers=self.layers,
            width=self.width,
            heads=max(1, self.width // 64),
            kv_heads=max(1, self.width // 64),
            ffn=-(-8 * self.width // 3 // 32) * 32,
            vocab=256,
            context=self.sequence,
            tied=False,
        )


def standard_library(limit_bytes: int = 16 << 20) -> Tensor:
    """The bytes of the modules of Python's standard library, as token ids."""
    text, folder = bytearray(), Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts:
            text += path.read_bytes() + b"\0"
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes].clone()


class TrainingJob:
    def __init__(self, settings: JobSettings, text: Tensor, order: int = 0) -> None:
        """`order`: jobs with another number train on other sequences."""
        self.settings, self._text, self.step, self._order = settings, text, 0, order
        self.model = CodeModel(settings.model)
        init_weights(self.model, 1)
        self.model.to(settings.device)
        self._optimizer = build_optimizer(self.model, OPTIM)

    @property
    def state(self) -> dict[str, Tensor]:
        return named_state(self.model, self._optimizer)

    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        with torch.no_grad():
            for name, tensor in self.state.items():
                tensor.copy_(state[name])
        self.step = step

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = self._batch(self._text[:-HELDOUT_BYTES], self._order * 10**7 + self.step)
            lr = learning_rate(self.step, OPTIM, self.settings.total_steps)
            update(self.model, self._optimizer, [batch], lr=lr, clip_norm=1.0)
            self.step += 1

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Nats per byte on text that the job does not train on."""
        heldout = self._text[-HELDOUT_BYTES:]
        losses = []
        for number in range(HELDOUT_BATCHES):
            batch = self._batch(heldout, 10**6 + number)
            losses.append(float(loss_sum(self.model, batch)) / batch.targets.numel())
        return sum(losses) / len(losses)

    def _batch(self, text: Tensor, seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - self.settings.sequence - 1, (self.settings.batch, 1), generator=random)
        rows = text[starts + torch.arange(self.settings.sequence + 1)].long().to(self.settings.device)
        return Batch(inputs=rows[:, :-1], targets=rows[:, 1:])
