"""EleutherAI's lm-evaluation-harness scores a server as it scores the same weights in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.server.engine import Engine

from .test_fuzz import serving

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it is no dependency of lakh")
pytest.importorskip("tenacity", reason="lm-eval is installed without [api]; it is no dependency of lakh")

TIMEOUT_S = 300.0
VOCAB, CONTEXT = 300, 192
CHOICES = [" left + right", " left - right\n", " right", " Größe, 日本"]
COMMON = 'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{data}"}}}}\ntest_split: test\n'
TASKS = {
    "choice": """task: local_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "text": """task: local_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 12}}"
metric_list: [{metric: bits_per_byte}]
""",
}
SCRIPT = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

folder, tasks, url, out = sys.argv[1:]
api = {"model": "tiny", "base_url": url, "tokenizer": folder, "num_concurrent": 2, "max_length": CONTEXT}
models = {"hf": ({"pretrained": folder, "dtype": "float32", "max_length": CONTEXT}, 1), "local-completions": (api, 6)}
found = {}
for model, (args, batch) in models.items():
    done = lm_eval.simple_evaluate(
        model, model_args=args, tasks=["local_choice", "local_text"], device="cpu", batch_size=batch,
        task_manager=TaskManager(include_path=tasks), bootstrap_iters=0,
    )
    found[model] = {
        "results": {name: {k: v for k, v in one.items() if k.endswith(",none")}
                    for name, one in done["results"].items()},
        "responses": {name: [doc["resps"] for doc in sorted(docs, key=lambda doc: doc["doc_id"])]
                      for name, docs in done["samples"].items()},
    }
open(out, "w").write(json.dumps(found))
"""


@pytest.mark.slow
def test_the_harness_gets_the_same_likelihoods_and_accuracy(save_model: Callable[..., Path], tmp_path: Path) -> None:
    folder, tasks, out = save_model(vocab=VOCAB, context=CONTEXT), tmp_path / "tasks", tmp_path / "found.json"
    tasks.mkdir()
    rows = [
        {"question": f"def add_{number}(left, right):\n    return", "choices": CHOICES, "answer": number % 4}
        for number in range(8)
    ]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in TASKS.items():
        (tasks / f"{name}.yaml").write_text(text + COMMON.format(data=tmp_path / "data.jsonl"))
    engine = Engine.load(str(folder))
    with serving(engine) as (url, _):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        command = [sys.executable, "-c", SCRIPT.replace("CONTEXT", str(CONTEXT)), folder, tasks]
        done = subprocess.run(
            [*map(str, command), f"{url}/v1/completions", str(out)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = (json.loads(out.read_text())[model] for model in ("hf", "local-completions"))
    for name, metrics in theirs["results"].items():
        assert ours["results"][name] == pytest.approx(metrics, abs=1e-5)
    for expected, found in zip(_choices(theirs), _choices(ours), strict=True):
        assert found[1] == expected[1]  # is greedy
        assert found[0] == pytest.approx(expected[0], abs=1e-3)  # sums of up to 20 tokens, each within 1e-4
    assert len({round(found[0], 2) for found in _choices(ours)}) > len(rows)  # choices differ
    texts = [[json.loads(str(doc[0][0])) for doc in one["responses"]["local_text"]] for one in (theirs, ours)]
    assert texts[1] == pytest.approx(texts[0], abs=1e-2)


def _choices(found: dict[str, dict[str, list[list[list[tuple[float, bool]]]]]]) -> list[tuple[float, bool]]:
    """The likelihood of each choice of each question, and whether it is the greedy completion."""
    pairs = [pair for doc in found["responses"]["local_choice"] for (pair,) in doc]
    return [(float(score), str(is_greedy) == "True") for score, is_greedy in pairs]
