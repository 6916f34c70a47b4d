"""Structured output: completions that match a JSON schema, a regular expression, a list of choices or a grammar.

constraint.py   what a request demands, in the forms of OpenAI, vLLM, SGLang and llama.cpp; no dependencies
grammar.py      compiles it with llguidance and computes which tokens may follow; needs the extra lakh[structured]
"""
