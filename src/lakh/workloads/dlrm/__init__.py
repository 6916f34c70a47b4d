"""Recommendation models: sharded embedding tables and a dense network over their pooled embeddings.

model.py           DLRM and DCNv2; batch.py, loss.py, auc.py, interaction.py
data.py            batches of the training stream; samples.py reads data sets: movielens.py, synthetic.py
parallel.py        the model on one of several ranks
embedding/         tables of one rank: bags of ids, lookups, exact sparse updates
sharding/          tables over ranks: plans, exchange of ids, embeddings and gradients
result.py          the result of a run, from its events
torchrec_plan.py   an EmbeddingPlan as a ShardingPlan of TorchRec
"""
