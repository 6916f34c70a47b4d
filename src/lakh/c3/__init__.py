"""c3: collectives that know the topology, as a torch backend.

`import lakh.c3` makes the name known where torch is installed; then `dist.init_process_group("c3")`. In reading order:
`spec/collectives.py` (schedules as data), `verify.py` (proves them), `topology.py` and `selection.py` (which one, and
why), `group.py` (ranks without torch, over the native core in native/), `torch_backend.py` (what torch calls;
torch_group.py, torch_work.py and torch_tensors.py are its parts), `memory.py` (registered tensors). This room knows no
model.
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:

    def __getattr__(name: str) -> object:
        if name in ("registered_empty", "registered_like"):
            from lakh.c3 import memory

            return getattr(memory, name)
        if name == "register":
            from lakh.c3 import torch_backend

            return torch_backend.register
        raise AttributeError(name)
