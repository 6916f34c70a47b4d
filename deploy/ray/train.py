"""A run on a Ray cluster: one torchrun per node, in a placement group that spreads over the nodes.

    ray job submit --working-dir . -- python deploy/ray/train.py --nodes 2 --gpus 8 recipes/node.py /shared/runs/mine

Exits with lakh's code: 0 done, 2 settings, 65 damaged data, 75 a node or peer was lost (submit again: the run resumes
from its newest checkpoint). The run's folder must be on a disk that every node sees.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PLACE_TIMEOUT_S = 600
LOST = 75
LOOPBACK = "127.0.0.1"


def lakh_command(recipe: str, run_dir: str, more: list[str]) -> list[str]:
    if any(Path(run_dir).glob("checkpoints/step-*/manifest.json")):
        return ["resume", run_dir, *more]
    return ["train", recipe, "--out", run_dir, *more]


@ray.remote(max_retries=0)
def run_node(nodes: int, ranks: int, endpoint: str, job: str, command: list[str]) -> int:
    # torchrun would take the address that the host name resolves to, which other nodes may not reach.
    address = ray.util.get_node_ip_address() if nodes > 1 else LOOPBACK
    torchrun = [sys.executable, "-m", "lakh.trainer.torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-id", job, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--max-restarts", "3"]
    torchrun += ["--local-addr", address]
    variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "280"}
    return subprocess.call([*torchrun, "-m", "lakh", *command], env=variables)


@ray.remote(num_cpus=0)
def node_address() -> str:
    return ray.util.get_node_ip_address()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node; 0 trains on CPUs")
    parser.add_argument("--ranks", type=int, help="ranks of a node  [default: one per GPU]")
    parser.add_argument("--cpus", type=int, default=8, help="CPUs to reserve on a node")
    parser.add_argument("--port", type=int, default=29400, help="where the nodes meet; not used on one node")
    parser.add_argument("recipe")
    parser.add_argument("run_dir")
    options, more = parser.parse_known_args()
    ray.init()
    bundle = {"CPU": options.cpus} | ({"GPU": options.gpus} if options.gpus else {})
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD" if options.nodes > 1 else "PACK")
    ray.get(group.ready(), timeout=PLACE_TIMEOUT_S)

    def on(index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    endpoint = f"{LOOPBACK}:0"  # one node needs no address that others reach, and any free port will do
    if options.nodes > 1:
        endpoint = f"{ray.get(node_address.options(scheduling_strategy=on(0)).remote())}:{options.port}"
    job = ray.get_runtime_context().get_job_id()
    arguments = (options.nodes, options.ranks or options.gpus or 1, endpoint, job)
    command = lakh_command(options.recipe, options.run_dir, more)
    tasks = [
        run_node.options(num_cpus=options.cpus, num_gpus=options.gpus, scheduling_strategy=on(index)).remote(
            *arguments, command
        )
        for index in range(options.nodes)
    ]
    try:
        codes = ray.get(tasks)
    except ray.exceptions.RayError as error:
        sys.stderr.write(f"lakh: a node was lost: {error}\n")
        return LOST
    return next((code for code in codes if code not in (0, LOST)), max(codes))


if __name__ == "__main__":
    sys.exit(main())
