"""Speculative decoding: propose draft tokens cheaply, let the model score them in one step, keep what it agrees with.

    proposer.py        which draft tokens each sequence brings to a step
    prompt_lookup.py   draft tokens from the sequence's own text
    draft_model.py     draft tokens from a smaller model
    policy.py          how many draft tokens pay off
    rejection.py       verification for unseeded sampling

The target model samples its own token at every position from its own logits and the sequence's own random numbers, and
a draft token is accepted while it equals that token. So the completion is the same with and without speculation, greedy
or sampled. Only draft tokens of a draft model for a sequence without a seed use rejection sampling, which accepts more
of them and keeps the distribution.
"""
