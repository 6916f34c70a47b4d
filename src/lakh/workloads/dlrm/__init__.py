"""Recommendation models: sharded embedding tables and a dense network over their pooled embeddings.

torchrec_plan.py   an EmbeddingPlan as a ShardingPlan of TorchRec
"""
