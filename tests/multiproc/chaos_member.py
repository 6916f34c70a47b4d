"""A member of the chaos test (bench/comm/chaos.py) as a program, forked from a process that has imported torch.

python -m tests.multiproc.chaos_member FOLDER MEMBER SIZE REJOINING STEPS PAUSE_S TIMEOUT_S [NAMESPACE]
"""

import sys
from pathlib import Path

from bench.comm.chaos import enter_namespace, run_member


def main() -> int:
    folder, member, size, rejoining, steps, pause_s, timeout_s, *namespace = sys.argv[1:]
    for name in namespace:
        enter_namespace(name)
    options = {"steps": int(steps), "pause_s": float(pause_s), "settle_s": 2.0, "timeout_s": float(timeout_s)}
    return run_member(Path(folder), int(member), int(size), rejoining == "1", **options)


if __name__ == "__main__":
    sys.exit(main())
