"""Pipeline schedules: in which order every rank computes, and what that costs.

operations  an operation, a schedule, and the checks that make it one
orders      GPipe, 1F1B (also with a deeper warm-up), breadth-first, interleaved, zero-bubble H1, H2 and V, DualPipe
timeline    start and end of every operation for given durations and delays: step time, bubble, activations in flight
"""
