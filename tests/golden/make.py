"""Makes the golden files beside it. Run it only when a format or the arithmetic of training changes on purpose:

python tests/golden/make.py

Old formats keep loading: a new format gets a new folder, and the old one stays with its test. Version 0.1 wrote
corpus-2 (`lakh corpus build`) and run-1 (`lakh train` on two ranks over c3, one of them killed); this script does not
make them again.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from conftest import write_code  # noqa: E402

from lakh import checkpoint, events  # noqa: E402
from lakh.corpus import build  # noqa: E402
from lakh.spec import Checkpoints, Data, Model, Optimizer, Run, Training  # noqa: E402
from lakh.tokens.dataset.packing import pack  # noqa: E402
from lakh.tokens.tokenizer.training import train as train_tokenizer  # noqa: E402
from lakh.trainer.loop import train  # noqa: E402


def golden_run(tokens: str) -> Run:
    return Run(
        name="golden",
        seed=7,
        model=Model(layers=2, width=16, heads=4, kv_heads=2, ffn=32, vocab=320, context=32),
        data=Data(tokens=tokens, sequence=16, batch=4, micro_batch=2),
        optim=Optimizer(lr=1e-2, warmup_steps=2),
        train=Training(steps=10, eval_every=5, eval_sequences=4, precision="f32", device="cpu", threads=1),
        checkpoint=Checkpoints(every=0),
    )


def losses(run_dir: Path) -> list[float]:
    return [event.loss for event in events.read(run_dir, rank=0) if isinstance(event, events.StepDone)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        write_code(base / "code", files=12)
        build([f"own:{base / 'code'}"], base / "corpus")
        train_tokenizer(base / "corpus", base / "tokenizer", vocab=320)
        shutil.rmtree(HERE / "tokens-1", ignore_errors=True)
        shutil.rmtree(HERE / "checkpoint-1", ignore_errors=True)
        pack(base / "corpus", base / "tokenizer", HERE / "tokens-1", heldout_fraction=0.2)
        os.chdir(HERE)  # run.toml travels with the checkpoint and must not name this machine's folders
        train(golden_run("tokens-1"), base / "run")
        shutil.copytree(checkpoint.find(base / "run"), HERE / "checkpoint-1")
        (HERE / "losses.json").write_text(json.dumps(losses(base / "run"), indent=1) + "\n")


if __name__ == "__main__":
    main()
