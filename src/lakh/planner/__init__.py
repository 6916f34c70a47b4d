"""The planner: what a run costs, how fast it goes and whether it fits, before money is spent.

Empty so far: the counters it will stand on are in `lakh.spec`. Lives without torch.
"""
