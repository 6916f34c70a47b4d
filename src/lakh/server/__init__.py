"""The server: completions from a trained model, in process, over HTTP and over gRPC.

Reading order. The engine: engine.py (what a step is), row.py (one request on its way), schedule.py (who gets how many
tokens), blocks.py (who holds which block, and which prefix it remembers), kv.py (their bytes), network.py (the model
as it is run) with kernels_cpu.py, decode_gpu.py and kernels_gpu.py, sampling.py (which token comes next),
speculate.py (guesses that pay), text.py (tokens to text, piece by piece), fim.py (prompts with a hole), weights.py
(what MODEL is). The faces: requests.py and dialects.py (how clients ask), keys.py, worker.py (one thread that steps
the engine), http.py, grpc.py with proto/, metrics.py. Measuring: bench.py, typing_load.py, loadgen.py.

Knows workloads and checkpoints; knows nothing of evals, trainers or the command line. The engine lives without aiohttp
and grpcio.
"""
