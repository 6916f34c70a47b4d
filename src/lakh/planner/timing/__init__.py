"""Seconds of one optimizer step, as a sum of terms that each have their own module.

gemm, attention, elementwise    computation of one layer's forward pass
layer                           one layer of one micro-batch: passes, host overhead, TP, CP and EP traffic
pipeline                        stages, transfers and bubble
data_parallel                   FSDP, ZeRO and gradient traffic, optimizer update
collectives                     cost of a collective on the cluster's network
step_time                       the sum
"""
