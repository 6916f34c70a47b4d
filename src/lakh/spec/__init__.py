"""Descriptions of models, meshes, clusters and runs that count and check themselves.

A `Run` is the one description that lakh plans, trains, stores and shows. All of it is frozen plain data:
`config.to_toml(run)` writes it, `load_run` reads it. Standard library only.
"""

from lakh.spec.cluster import Cluster, Tier
from lakh.spec.faults import Fault
from lakh.spec.gpu import Gpu
from lakh.spec.mesh import Mesh
from lakh.spec.model import Model
from lakh.spec.run import Adapter, Checkpoints, Data, Optimizer, Preference, Run, Source, Training, load_run

__all__ = [
    "Adapter",
    "Checkpoints",
    "Cluster",
    "Data",
    "Fault",
    "Gpu",
    "Mesh",
    "Model",
    "Optimizer",
    "Preference",
    "Run",
    "Source",
    "Tier",
    "Training",
    "load_run",
]
