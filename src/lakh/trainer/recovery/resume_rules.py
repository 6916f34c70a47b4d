"""Which settings of a run may change when it resumes, and why the others may not.

An entry covers a setting or all settings of a section; the most specific entry counts. A setting without an entry is
refused, and a test checks that every setting of `Run` has one.
"""

from __future__ import annotations

from lakh import config
from lakh.errors import UserError
from lakh.spec.run import Run

__all__ = ["FIXED", "MAY_CHANGE", "check_changes", "reason_fixed"]

_ORDER = "the order of the data depends on it"
_WEIGHTS = "the weights belong to this model"
_CONTENT = "what the model reads depends on it"

FIXED = {
    "seed": _ORDER,
    "workload": _WEIGHTS,
    "model": _WEIGHTS,
    "data.sequence": _ORDER,
    "data.packing": _ORDER,
    "data.fim_rate": _CONTENT,
    "data.fim_spm": _CONTENT,
    "data.document_mask": _CONTENT,
    "dlrm": _WEIGHTS,
    "adapter": "the adapters in the checkpoint belong to it",
    "preference": "the loss compares with it",
    "optim.kind": "the optimizer state in the checkpoint belongs to it",
}

MAY_CHANGE = (
    "name",
    "init_from",  # read only at the first start; the base of adapters has a fingerprint
    "mesh",
    "cluster",
    "data.tokens",  # the data has a fingerprint, which is compared
    "data.mixture",
    "data.batch",
    "data.micro_batch",
    "data.prefetch",
    "data.skip",  # only sequences that were not read yet (trainer/data.py)
    "data.cache",
    "dlrm.dataset",  # the data has a fingerprint, which is compared
    "dlrm.lr",
    "dlrm.sharding",
    "dlrm.memory",
    "dlrm.forward_dtype",
    "dlrm.backward_dtype",
    "optim",
    "train",
    "checkpoint",
)


def reason_fixed(path: str) -> str:
    """Why a setting may not change when a run resumes; empty if it may."""
    while path:
        if path in FIXED:
            return FIXED[path]
        if path in MAY_CHANGE:
            return ""
        path = path.rpartition(".")[0]
    return "no rule allows it to change"


def check_changes(before: Run, after: Run) -> list[config.Change]:
    """The settings that differ. Raises UserError if one of them may not change."""
    changes = config.diff(before, after)
    for path, old, new in changes:
        if reason := reason_fixed(path):
            found = f"the run started with {old}, and {reason}"
            raise UserError(f"{path} = {new}", found, f"set it back to {old}, or start a new run")
    return changes
