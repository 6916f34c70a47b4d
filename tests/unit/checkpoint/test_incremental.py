"""Incremental checkpoints: chains, resharding, damage of a base, retention, and weights that cannot resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lakh import checkpoint
from lakh.checkpoint.format import MAX_CHAIN, Manifest
from lakh.checkpoint.incremental import TensorRole
from lakh.checkpoint.loading import CheckpointReader
from lakh.errors import CorruptCheckpoint, UserError

State = dict[str, torch.Tensor]
ROLES: dict[str, TensorRole] = {"model.w": "weight", "m": "first_moment", "v": "second_moment"}


def role_of(name: str) -> TensorRole:
    return ROLES.get(name, "other")


class SmallRun:
    """A state that changes a little at each step, saved with a chain."""

    def __init__(self, run_dir: Path, mode: str, *, factored: bool = False) -> None:
        self.run_dir = run_dir
        self.random = torch.Generator().manual_seed(3)
        self.state: State = {
            "model.w": self.noise(96, 64, 0.02),
            "m": self.noise(96, 64, 1e-3),
            "v": self.noise(96, 64, 1e-3).square(),
            "step": torch.tensor(0.0),
        }
        self.chain = checkpoint.DeltaChain(mode, role_of, factored=factored)
        self.copies = checkpoint.HostCopies()
        self.saved: dict[int, State] = {}

    def noise(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.random) * scale

    def save(self, step: int) -> str:
        self.state["model.w"] += self.noise(96, 64, 1e-4)
        self.state["m"].mul_(0.9).add_(self.noise(96, 64, 1e-4))
        self.state["v"].mul_(0.99).add_(self.noise(96, 64, 1e-4).square())
        self.state["step"] += 1
        self.saved[step] = {name: tensor.clone() for name, tensor in self.state.items()}
        folder = str(self.run_dir / "checkpoints" / checkpoint.folder_name(step))
        facts = {"sequence_index": step, "run_sha256": "r", "data_sha256": "d", "attachments": {}}
        saving = checkpoint.CheckpointSave(folder, self.state, step=step, chain=self.chain, **facts)
        saving.start(self.copies)
        for tensor in self.state.values():
            tensor.fill_(9)  # the copy is taken: later changes are not saved
        self.state = {name: tensor.clone() for name, tensor in self.saved[step].items()}
        saving.finish()
        return folder

    def load(self, folder: str) -> State:
        into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        checkpoint.load(folder, into)
        return into


def test_a_chain_of_exact_checkpoints_is_bit_exact_and_ends_after_eight(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, "exact")
    folders = {step: run.save(step) for step in range(1, 12)}
    modes = [Manifest.read(folder).mode for folder in folders.values()]
    assert modes == ["full", *["exact"] * MAX_CHAIN, "full", "exact"]
    for step, folder in folders.items():
        for name, tensor in run.load(folder).items():
            assert torch.equal(tensor, run.saved[step][name]), (step, name)
    full, delta = Manifest.read(folders[1]), Manifest.read(folders[2])
    assert delta.bytes < 0.8 * full.bytes
    assert checkpoint.newest_usable(tmp_path) == (folders[11], [])


@pytest.mark.parametrize(("factored", "share"), [(False, 0.17), (True, 0.09)])
def test_bounded_errors_do_not_add_up_and_stand_in_the_manifest(tmp_path: Path, factored: bool, share: float) -> None:
    run = SmallRun(tmp_path, "bounded", factored=factored)
    folders = {step: run.save(step) for step in range(1, 10)}
    full = Manifest.read(folders[1])
    for step in range(2, 10):
        manifest, found, wanted = Manifest.read(folders[step]), run.load(folders[step]), run.saved[step]
        assert manifest.bytes < share * full.bytes + 2000  # the headers of a small file
        assert torch.equal(found["step"], wanted["step"]), "what has no role is exact"
        error = float((found["model.w"] - wanted["model.w"]).norm() / wanted["model.w"].norm())
        assert error < 1e-3
        delta = "delta4" if factored else "delta5"
        assert manifest.errors[delta].relative_rms == pytest.approx(error, rel=1e-3)
        assert set(manifest.errors) == ({delta, "value4", "factored"} if factored else {delta, "value5", "log"})
        assert manifest.errors[delta].block_bound == pytest.approx(1 / 14 if factored else 1 / 40)


def test_any_box_of_an_incremental_checkpoint_can_be_read(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, "exact")
    folder = [run.save(step) for step in (1, 2, 3)][-1]
    target = torch.zeros(10, 7)
    CheckpointReader(folder).fill("model.w", (33, 5), target)
    assert torch.equal(target, run.saved[3]["model.w"][33:43, 5:12])


def test_damage_of_a_base_loses_what_depends_on_it_and_no_more(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, "exact")
    folders = {step: run.save(step) for step in (1, 2, 3, 4)}
    file = Path(folders[3]) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    usable, skipped = checkpoint.newest_usable(tmp_path)
    assert usable == folders[2]
    assert [error.where for error in skipped] == [str(file)] * 2
    assert checkpoint.prune(tmp_path, keep=1).removed == [], "the base of the kept one stays"


def test_a_base_that_was_written_again_is_not_the_base(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, "exact")
    folders = {step: run.save(step) for step in (1, 2)}
    rewound = SmallRun(tmp_path, "exact")
    rewound.random.manual_seed(9)
    rewound.save(1)
    with pytest.raises(CorruptCheckpoint, match="its base step-00000001 is missing or was written again"):
        checkpoint.verify_chain(folders[2])


def test_retention_keeps_the_chain_of_what_it_keeps(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, "exact")
    folders = {step: run.save(step) for step in range(1, 13)}  # full ones are 1 and 10
    known = set(folders.values())
    done = checkpoint.prune(tmp_path, keep=2, known_good=known)
    assert done.kept == [folders[11], folders[12]]
    assert done.removed == [folders[step] for step in range(1, 10)], "10 is the base of 11"
    run.load(folders[12])


def test_a_failed_save_makes_the_next_one_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(tmp_path, "exact")
    run.save(1)

    def full_disk(self: Manifest, folder: str) -> Manifest:
        raise UserError(folder, "full", "free some space")

    monkeypatch.setattr(Manifest, "write", full_disk)
    with pytest.raises(UserError):
        run.save(2)
    monkeypatch.undo()
    assert Manifest.read(run.save(3)).mode == "full"


def test_weights_serve_but_do_not_resume(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, "weights")
    full, weights = run.save(1), run.save(2)
    manifest = Manifest.read(weights)
    assert (manifest.mode, manifest.can_resume, set(manifest.tensors)) == ("weights", False, {"model.w"})
    assert manifest.tensors["model.w"].dtype == "bfloat16"
    into = {"model.w": torch.zeros(96, 64, dtype=torch.bfloat16)}
    checkpoint.load(weights, into)
    assert torch.equal(into["model.w"], run.saved[2]["model.w"].bfloat16())
    assert checkpoint.newest_usable(tmp_path) == (full, []), "a run resumes from the full one"
    with pytest.raises(UserError, match="holds only bf16 weights and cannot resume"):
        run.load(weights)
    assert checkpoint.prune(tmp_path, keep=1).kept == [full]
