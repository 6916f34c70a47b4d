"""The server: completions from a trained model, in process or over HTTP.

Reading order: engine.py (prompts in, completions out), cache.py (keys and values of a ragged batch),
sampling.py (which token comes next), text.py (tokens to text, piece by piece), weights.py (what MODEL is);
then the face: requests.py (the OpenAI form of a request), worker.py (one thread, a bounded queue),
metrics.py, http.py.

Knows workloads and checkpoints; knows nothing of evals, trainers or the command line. The engine lives
without aiohttp.
"""
