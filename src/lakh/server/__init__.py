"""The server: completions from a trained model, in process, over HTTP and over gRPC.

Reading order. The engine: engine.py (what a step is), row.py (one request on its way), schedule.py (who gets how many
tokens), blocks.py (who holds which block, and which prefix it remembers), kv.py (their bytes), network.py (the model
as it is run) and runner.py (by which kernels: kernels_cpu.py, decode_gpu.py, chunks_gpu.py and others), params.py and
sampling.py (which token comes next), speculate.py, draft.py and rejection.py (guesses that pay), text.py (tokens to
text, piece by piece), fim.py and heal.py (prompts with a hole, or half a word), weights.py (what MODEL is).

What answers: backend.py (what that means), local.py with worker.py (an engine in this process), process.py (in one of
its own), gateway.py with replica.py, affinity.py and fim_text.py (engines elsewhere), textcache.py over store.py (what
is known already). The faces: requests.py and dialects.py (how clients ask), desk.py with keys.py and quota.py (who
may), http.py with openapi.py, grpc.py with proto/, tls.py, metrics.py. New weights: sync.py, follow.py. Measuring:
bench.py; typing_load.py, loadgen.py, load_target.py, load_report.py, before_after.py.

Knows workloads and checkpoints; knows nothing of evals, trainers or the command line. The engine lives without aiohttp
and grpcio, the gateway without torch.
"""
