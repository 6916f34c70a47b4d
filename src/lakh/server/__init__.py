"""The server: completions from a trained model, in process, over HTTP and over gRPC.

Rooms, from below; who may import whom is a contract in pyproject.toml:

    model/     weights, network, blocks of keys and values, kernels: tokens to scores
    guesses/   speculation: lookups, drafts, and when they pay
    engine.py  what a step is; row.py (a request on its way), seating.py and schedule.py (who works, and on how many
               tokens), prompt.py with lines.py, fim.py and heal.py (what is asked), params.py, sampling.py and
               drawing.py (which token comes next), text.py and spelling.py (tokens to text, piece by piece); sync.py
               and follow.py bring new weights
    answers/   an engine in this process or its own, and answers that are known already
    gateway/   engines elsewhere
    faces/     HTTP and gRPC: the desk, keys, quotas, dialects, TLS
    load/      developers who type, as load

Words they share: requests.py (how clients ask), backend.py (what answers), store.py (what several servers share),
metrics.py, proto/.

Knows workloads and checkpoints; knows nothing of evals, trainers or the command line. The engine lives without aiohttp
and grpcio, the gateway without torch.
"""
