"""c3: topology-aware, fault-tolerant collective communication, as a torch.distributed backend.

`import lakh.c3.torch.backend` registers the backend; then `dist.init_process_group("c3")`. Reading order:
`spec/collectives.py` (schedules as data), `topology.py` and `selection.py` (which algorithm, and why),
`schedule_cache.py`, `network/` (measured links), `group.py` (the communicator over the native core in native/),
`torch/` (the backend, registered memory, GPU staging), `faults/` (membership and recovery).
"""
