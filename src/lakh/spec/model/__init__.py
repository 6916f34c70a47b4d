"""A decoder-only transformer: its settings, its family, and how many parameters, FLOPs and bytes it has."""

from lakh.spec.model.experts import Experts
from lakh.spec.model.families import FAMILIES, ModelFamily
from lakh.spec.model.latent import Latent
from lakh.spec.model.model import MOST_LAYERS, Model
from lakh.spec.model.rope import RopeScaling
from lakh.spec.model.trainable import OPTIONAL_PARTS
from lakh.spec.model.window import SlidingWindow

__all__ = [
    "FAMILIES",
    "MOST_LAYERS",
    "OPTIONAL_PARTS",
    "Experts",
    "Latent",
    "Model",
    "ModelFamily",
    "RopeScaling",
    "SlidingWindow",
]
