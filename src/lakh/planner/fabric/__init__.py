"""Flow-level simulation of a cluster's network: how fast a collective runs under a routing policy.

topology        switches and links of a `Cluster`, with dead links and slow NICs
traffic         who sends how much to whom: collectives of one or several jobs, built in or from `spec` schedules
routing         the path of every flow: ECMP, path pinning, E-ECMP, traffic engineering, flowlets, packet spraying
edge_colouring  conflict-free paths, exact on a two-stage Clos
max_min         rates of all flows: max-min fair, or with PFC's back-pressure
completion      finish times of flows that start and end at different times
transport       retransmission over distance, and the cap on bytes in flight
simulation      a scenario in, a report out

Compiled with numba at first use. Every figure is simulated.
"""
