"""What every benchmark says of its machine, and the dated file it keeps."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path
from typing import Any

from lakh import storage

__all__ = ["keep", "machine"]


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure."""
    torch = sys.modules.get("torch")  # a benchmark without torch says nothing of it, and does not wait for it
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads() if torch else None,
        "gpu": torch.cuda.get_device_name() if torch and on_gpu else None,
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__ if torch else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def keep(folder: Path, theme: str, command: str, data: dict[str, Any]) -> str:
    """Write <theme>_<hardware>_<date>.md: complete by itself."""
    where = data["machine"]
    hardware = (where["gpu"] or f"{where['cores']}x{where['cpu']}").replace(" ", "-")
    rows = data["rows"]
    lines = [f"# {theme}, {hardware}, {where['date']}", "", f"command: `{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in where.items()]
    lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_figure(value) for value in row.values()) + " |" for row in rows]
    path = folder / f"{theme}_{hardware}_{where['date']}.md"
    storage.write_bytes(path, ("\n".join(lines) + "\n").encode())
    return str(path)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
