"""One replica of the job under torchft, or its lighthouse: `python -m bench.faults.torchft_replica ...`.

Defaults of torchft 0.2: a replica counts as lost after 5 s without a heartbeat, unless its peers report errors earlier.
Gradients are averaged as one flat tensor by the manager: the hook of torchft's DistributedDataParallel ends the
surviving replicas with an AssertionError when a peer is lost (`assert fut._fut` on the future of a skipped reduction).
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

from bench.faults.job import settings

__all__: list[str] = []


def lighthouse(min_replicas: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=min_replicas, join_timeout_ms=1000)
    print(server.address(), flush=True)
    time.sleep(3600)


def train(address: str, replica: int, replicas: int, steps: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from lakh.spec import load_run
    from lakh.workloads.code.model import CodeModel, init_weights

    run = load_run("laptop", tuple(settings(steps)))
    torch.set_num_threads(1)
    model = CodeModel(run.model)
    init_weights(model, 1)
    adamw = torch.optim.AdamW(model.parameters(), lr=run.optim.lr)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), adamw.load_state_dict(state["optim"])),
        state_dict=lambda: {"model": model.state_dict(), "optim": adamw.state_dict()},
        min_replica_size=replicas - 1,
        replica_id=f"replica_{replica}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        hostname="localhost",
    )
    optimizer, parameters = Optimizer(manager, adamw), list(model.parameters())
    rows, micro = run.data.batch // replicas, run.data.micro_batch
    generator = torch.Generator().manual_seed(replica)
    with (folder / f"{replica}.jsonl").open("a") as log:
        while manager.current_step() < steps:
            tokens = torch.randint(0, run.model.vocab, (rows, run.data.sequence + 1), generator=generator)
            optimizer.zero_grad()
            before = manager.current_step()
            for first in range(0, rows, micro):
                part = tokens[first : first + micro]
                scale = 1 / (part[:, 1:].numel() * (rows // micro))
                model(part[:, :-1], None, targets_BT=part[:, 1:], scale=scale).backward()
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            flat = parameters_to_vector(gradients)
            manager.allreduce(flat).wait()
            vector_to_parameters(flat, gradients)
            optimizer.step()
            if manager.current_step() > before:
                line = {"time_s": time.time(), "step": before, "participants": manager.num_participants()}
                log.write(json.dumps(line) + "\n")
                log.flush()
    manager.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(int(sys.argv[2]))
    else:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
