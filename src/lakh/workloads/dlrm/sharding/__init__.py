"""Embedding tables over ranks.

plans.py          which rank holds which part of each table: by the planner, by one kind, or from a file
layout.py         a plan as the parts of each rank and their columns
exchange.py       ids to the ranks that look them up, pooled embeddings back, gradients the same way
node_exchange.py  the same for table-row-wise tables, in two levels
network.py        collectives of a group of ranks, with their bytes
columns.py        columns of parts and of samples (kernels.py)
codec.py          types of values on the network
tables.py         the sharded tables as a module
"""
