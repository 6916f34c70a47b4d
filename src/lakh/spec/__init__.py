"""Words: descriptions of models, meshes, clusters and runs that can count and check themselves.

A `Run` is the one description that lakh plans, trains, stores and shows. Standard library only; no torch, no I/O but
reading recipes and TOML. Everything here is frozen plain data: `config.to_toml(run)` writes it, `load_run` reads it.
"""

from lakh.spec.cluster import Cluster, Gpu, Tier
from lakh.spec.faults import Fault
from lakh.spec.mesh import Mesh
from lakh.spec.model import Model
from lakh.spec.run import Checkpoints, Data, Optimizer, Run, Source, Training, load_run

__all__ = [
    "Checkpoints",
    "Cluster",
    "Data",
    "Fault",
    "Gpu",
    "Mesh",
    "Model",
    "Optimizer",
    "Run",
    "Source",
    "Tier",
    "Training",
    "load_run",
]
