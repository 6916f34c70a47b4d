"""Completions: generate.py gets them from a model, endpoint.py from an OpenAI-compatible server, samples.py reads and
writes them as JSONL."""
