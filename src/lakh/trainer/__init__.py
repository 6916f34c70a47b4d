"""The trainer: runs a training job from its first step to its last, on one rank or many.

loop.py             the run: build the parts, take steps, evaluate, save     (start here)
step.py             one optimizer update
workloads/          what the loop asks of a workload, such as its data, model and evaluation
data.py             the batches of this rank, the position in the stream and its hash
checkpointer.py     save and restore
evaluation.py       held-out loss and user hooks (hooks.py)
initial_weights.py  first weights: by the seed, or from another model
run_folder.py       the lock and the settings file of a run's folder
preflight.py        check and estimate a run before it starts
optim/              AdamW, Muon, learning rate schedule
launch/             start and restart ranks; join the process group
recovery/           stop requests, injected faults, loss spikes, losing and admitting ranks, copies in memory
observability/      events, step metrics, network traffic, TensorBoard and Prometheus
tuning/             micro-batch search, CUDA graphs, memory
"""
