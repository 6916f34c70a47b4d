"""c3: topology-aware, fault-tolerant collective communication, as a torch.distributed backend.

`import lakh.c3.torch.backend` registers the backend; then `dist.init_process_group("c3")`. Reading order:
`spec/collectives.py` (schedules as data), `schedules/` (cache and verifier), `topology.py` and `selection.py` (which
algorithm, and why), `network/` (measured links), `group.py` (the communicator over the native core in native/),
`torch/` (the backend, registered memory, GPU staging), `faults/` (membership and recovery).
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:

    def __getattr__(name: str) -> object:
        if name in ("registered_empty", "registered_like"):
            from lakh.c3.torch import registered_memory

            return getattr(registered_memory, name)
        if name == "register":
            from lakh.c3.torch import backend

            return backend.register
        raise AttributeError(name)
