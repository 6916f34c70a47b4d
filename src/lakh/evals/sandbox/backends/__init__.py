"""Isolation backends in order of preference, and `make_backend` by name.

bubblewrap   namespaces, read-only system, private /tmp, seccomp
landlock     the kernel refuses file access and system calls; works where namespaces are forbidden
gvisor       docker or podman with the runtime runsc
docker       docker or podman with its default runtime
none         rlimits only; chosen by --unsafe and never by itself
"""

from __future__ import annotations

from lakh.errors import UserError
from lakh.evals.sandbox.isolation import IsolationBackend
from lakh.evals.sandbox.packages import SandboxPackages

__all__ = ["BACKENDS", "HOST_BACKENDS", "REMEDIES", "make_backend"]

BACKENDS = ("bubblewrap", "landlock", "gvisor", "docker")
HOST_BACKENDS = ("bubblewrap", "landlock")  # containers bring their own control group

_IMAGE_REMEDY = "pull that image with docker or podman, or name an existing one in LAKH_EVAL_IMAGE"
REMEDIES = {
    "bubblewrap": "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or bwrap's AppArmor profile; in a "
    "container, more privileges) and install bubblewrap 0.7 or newer",
    "landlock": "use a Linux kernel of 6.2 or newer with landlock enabled (lsm=landlock,... on its command line)",
    "gvisor": _IMAGE_REMEDY,
    "docker": _IMAGE_REMEDY,
}


def make_backend(name: str, packages: SandboxPackages | None = None) -> IsolationBackend:
    """The backend of this name; UserError if this machine lacks what it needs. Imports only what is asked for."""
    if name == "bubblewrap":
        from lakh.evals.sandbox.backends import bubblewrap

        return bubblewrap.Bubblewrap(packages)
    if name == "landlock":
        from lakh.evals.sandbox.backends import landlock

        return landlock.Landlock(packages)
    if name in ("gvisor", "docker"):
        from lakh.evals.sandbox.backends import container

        if packages is not None:
            found = f"{name} has the packages of its image only"
            raise UserError("--packages", found, "use --sandbox bubblewrap or landlock")
        return container.Container(gvisor=name == "gvisor")
    raise UserError(f"--sandbox {name}", "no such isolation backend", f"choose one of: {', '.join(BACKENDS)}")
