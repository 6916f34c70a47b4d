"""The figures of bench/serve_h200.sh beside their targets, one line each.

    python -m bench.serve.bars FOLDER

A missing part (it failed or ran out of time) is shown as such; its log is in the same folder.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Read = Callable[[Any], float]
# file, what, how to read it, target, whether more is better
BARS: list[tuple[str, str, Read, float, bool]] = [
    ("decode", "tokens/s, batch 1", lambda got: _batch(got, 1), 1000, True),
    ("decode", "tokens/s, batch 64", lambda got: _batch(got, 64), 25_000, True),
    ("loadgen", "end to end p99, ms", lambda got: got["e2e_ms"]["p99"], 120, False),
    ("loadgen", "timeouts, share", lambda got: got["timeouts"] / max(got["sent"], 1), 0.003, False),
    ("ttft", "first token cold p50, ms", lambda got: got["cold_ms"]["p50"], 15, False),
    ("ttft", "first token warm p50, ms", lambda got: got["warm_ms"]["p50"], 5, False),
]


def _batch(got: Any, batch: int) -> float:
    return next(float(row["tok_per_s"] or 0) for row in got["rows"] if row["batch"] == batch)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text().strip().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None


def main() -> None:
    folder = Path(sys.argv[1])
    for name, what, read, bar, more in BARS:
        try:
            value = read(_read(folder / f"{name}.json"))
        except (TypeError, KeyError, StopIteration, AttributeError):
            print(f"| {what} | not measured: see {name}.json and the logs | {bar:g} | |")
            continue
        reached = value >= bar if more else value < bar
        print(f"| {what} | {value:,.4g} | {bar:g} | {'reached' if reached else 'not reached'} |")
    sync = _read(folder / "sync.json")
    words = "not measured" if not sync else f"{sync.get('transfer_ms')} transfer, {sync.get('swap_ms')} swap"
    print(f"| weight sync of {(sync or {}).get('shape', '?')}, ms | {words} | | measured |")


if __name__ == "__main__":
    main()
