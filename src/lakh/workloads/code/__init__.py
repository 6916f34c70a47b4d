"""The code language model: model.py (the network), data.py (batches), loss.py, parallel.py (sharding), hf.py (formats).

A Llama-architecture decoder, so that transformers, vLLM, SGLang and llama.cpp load what lakh exports.
"""
