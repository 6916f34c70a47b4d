"""Finds the peers of a benchmark before anything is measured."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["INSTALL", "Peer", "detect_peers"]

INSTALL = "pip install 'lakh[bench]'"


@dataclass(frozen=True)
class Peer:
    """A system that lakh is compared with, and the Python modules and programs it needs."""

    name: str
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    install: str = INSTALL

    @property
    def missing(self) -> list[str]:
        folder = str(Path(sys.executable).parent)
        return [
            *(name for name in self.modules if importlib.util.find_spec(name) is None),
            *(name for name in self.programs if not (shutil.which(name) or shutil.which(name, path=folder))),
        ]


def detect_peers(wanted: Sequence[str], peers: Sequence[Peer], log: Callable[[str], object]) -> list[str]:
    """The wanted systems that can run here; names each missing one and how to install it. Imports nothing."""
    known = {peer.name: peer for peer in peers}
    present = []
    for name in wanted:
        missing = known[name].missing if name in known else []
        if missing:
            log(f"{name} is left out: {', '.join(missing)} not found; install it with {known[name].install}")
        else:
            present.append(name)
    return present
