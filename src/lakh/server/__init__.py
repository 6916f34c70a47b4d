"""The server: completions from a trained model, in process, over HTTP and over gRPC. Reading order:

    engine.py       Engine.step: schedule, run the model, sample, postprocess; offline.py for many prompts at once
    sequence.py     one completion in progress          scheduler.py   waiting and running queues, KV-cache blocks
    sampler.py      sampling and draft verification     sampling/      parameters, logits to tokens
    detokenizer.py  tokens to text                      stopping.py    stop strings and stop rules
    model/          weights, network, KV cache, kernels: tokens to logits
    prompts/        encoding, fill in the middle, token healing
    speculation/    draft tokens: prompt lookup, draft model, when they pay off
    backends/       an engine in this process or a child process, a cache of completions
    gateway/        engines elsewhere as one backend
    api/            HTTP dialects and gRPC, API keys, quotas, TLS
    weights/        new weights for a running engine
    loadgen/        simulated users as load

backend.py, request.py, store.py and metrics.py are shared by backends, gateway and API. The engine is independent of
aiohttp and grpcio, the gateway of torch. pyproject.toml has the import contract.
"""
