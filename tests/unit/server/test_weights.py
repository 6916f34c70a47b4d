"""The model of a path, also while its run continues."""

import shutil
from pathlib import Path

import pytest

from lakh import checkpoint, config
from lakh.errors import DataError, UserError
from lakh.server.model import weights
from lakh.spec import Data, Model, Run
from lakh.spec.embedding import EmbeddingTable, Recommender
from lakh.workloads.code.model import CodeModel, init_weights

SPEC = Model(layers=1, width=16, heads=2, kv_heads=1, ffn=16, vocab=40, context=16)
RUN = Run(name="r", model=SPEC, data=Data(sequence=16))


def save(run_dir: Path, step: int, run: Run = RUN) -> str:
    model = CodeModel(SPEC)
    init_weights(model, step)
    folder = str(run_dir / "checkpoints" / checkpoint.folder_name(step))
    checkpoint.save(
        folder,
        {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        step=step,
        sequence_index=step,
        run_sha256=config.fingerprint(run),
        data_sha256="d",
        attachments={"run.toml": config.to_toml(run).encode(), "tokenizer.json": b"{}"},
    )
    return folder


def test_a_recommendation_model_is_not_served(tmp_path: Path) -> None:
    tables = Recommender(tables=(EmbeddingTable(name="words", rows=64, width=16),))
    save(tmp_path, 5, Run(name="r", workload="dlrm", dlrm=tables, data=Data(sequence=1, batch=2, micro_batch=2)))
    with pytest.raises(UserError, match="is a recommendation model; give a language model"):
        weights.read(tmp_path)


def test_a_checkpoint_removed_meanwhile_is_replaced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 5)
    read_model = checkpoint.read_model

    def read_late(folder: str) -> object:
        if folder == old:
            new = save(tmp_path, 10)
            shutil.rmtree(old)
            assert new != old
        return read_model(folder)

    monkeypatch.setattr(checkpoint, "read_model", read_late)
    found = weights.read(tmp_path)
    assert found.source.endswith("step-00000010")
    shutil.rmtree(found.source)
    assert found.tokenizer_json.read_bytes() == b"{}", "what was read does not need its folder any more"


def test_a_damaged_newest_checkpoint_is_an_error(tmp_path: Path) -> None:
    (Path(save(tmp_path, 5)) / "rank-00000.safetensors").unlink()
    with pytest.raises(DataError, match=r"rank-00000\.safetensors"):
        weights.read(tmp_path)
