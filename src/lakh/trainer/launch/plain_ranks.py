"""Run a command as ranks on this machine once, without restarts. Independent of torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lakh.errors import PeerLost, PeerTimeout, from_dict
from lakh.trainer.launch.rank_processes import last_json_line

__all__ = ["run_plain_ranks"]

TIMEOUT_S = 600.0


def run_plain_ranks(arguments: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run `lakh ARGUMENTS` as `ranks` processes; returns the JSON document that rank 0 prints."""
    with tempfile.TemporaryDirectory(prefix="lakh-ranks-") as folder:
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "LAKH_RENDEZVOUS": str(Path(folder) / "rendezvous"),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            }
            command = [sys.executable, "-m", "lakh", *arguments, "--json"]
            with (Path(folder) / f"{rank}.out").open("wb") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output))
        try:
            for process in processes:
                process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            found = f"its ranks did not end within {TIMEOUT_S:g} s"
            raise PeerTimeout(f"lakh {arguments[0]}", found, "use fewer ranks or a smaller message") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        document = last_json_line(Path(folder) / "0.out")
    if "error" in document:
        raise from_dict(document["error"])
    if not document:
        raise PeerLost(f"lakh {arguments[0]}", "rank 0 ended without a result", "see what it printed")
    return document
