"""The sharding planner of embedding tables: how to split each table, where to place the pieces, and how good that is.

tables.py          reads tables: lakh's TOML, EmbeddingBagCollection configs, TorchRec's planner statistics
cost_model.py      the time and memory of every way to shard a table: bytes over bandwidths
options.py         one way to shard a table, with its costs
bound.py           a lower bound of the slowest rank over all options and placements
placement.py       options to ranks: LPT and Karmarkar-Karp, under memory limits
search.py          which option for each table: split search, then ruin and recreate
milp.py            the same choice as a mixed-integer program (HiGHS), for small sets
sharding.py        all of it: `plan_sharding` -> `ShardingResult`
torchrec_stats.py  TorchRec's statistics text: its costs and its plan
"""
