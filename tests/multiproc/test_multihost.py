"""Several machines, emulated: network namespaces of this kernel, each with its own interfaces, joined by a bridge.

Ranks of different namespaces share no loopback and no ports: what works here needs nothing but the network.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from lakh import events

pytestmark = pytest.mark.timeout(280)
ROOT = Path(__file__).resolve().parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """Two namespaces, 10.77.0.1 and 10.77.0.2, on one bridge."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make network namespaces: apt-get install iproute2, and run as root")
    tag = uuid.uuid4().hex[:6]
    bridge, names = f"lb{tag}", [f"lakh-{tag}-{i}" for i in range(2)]
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel makes no bridge ({error.stderr.strip()}): run with CAP_NET_ADMIN")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"v{tag}{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{tag}{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, timeout=20, check=False)


def torchrun(host: str, number: int, *words: str) -> subprocess.Popen[str]:
    command = [
        *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)),
        *("--master-addr", "10.77.0.1", "--master-port", "29577"),
        *("-m", "lakh", *words, "--json"),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_two_machines_train_the_same_run_as_one(hosts, tiny_recipe: Path, tmp_path: Path, train_in_process) -> None:
    alone = train_in_process(tiny_recipe, tmp_path / "alone")
    run_dir = tmp_path / "run"
    ranks = [torchrun(host, i, "train", str(tiny_recipe), "--out", str(run_dir)) for i, host in enumerate(hosts)]
    try:
        ended = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(err[-2000:] for _, err in ended)
    answer = json.loads(ended[0][0].splitlines()[-1])
    assert answer["stream_sha256"] == alone["stream_sha256"]
    assert answer["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    started = [e for e in events.read(run_dir) if isinstance(e, events.RunStarted)]
    assert {(e.rank, e.world) for e in started} == {(0, 2), (1, 2)}


def test_the_slurm_script_starts_one_torchrun_per_node_and_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """With fake Slurm commands that record their arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    many = "echo node-a; seq -f node-%g 20000"  # more than a pipe holds: who reads one name only breaks it
    (tools / "scontrol").write_text(f'#!/bin/sh\nif [ "$1" = show ]; then {many}; else echo requeue "$2"; fi\n')
    (tools / "srun").write_text('#!/bin/sh\necho "$@"\nexit ${SRUN_CODE:-0}\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_GPUS_ON_NODE": "4",
    }
    script = ROOT / "deploy" / "slurm" / "train.sbatch"

    def submit(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), "node", str(tmp_path / "run"), "--set", "seed=3"],
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    first = submit()
    assert first.returncode == 0, first.stderr
    assert "--nnodes 2 --nproc-per-node 4" in first.stdout
    assert "--rdzv-endpoint node-a:20041" in first.stdout
    assert f"-m lakh train node --out {tmp_path / 'run'} --set seed=3" in first.stdout
    done = tmp_path / "run" / "checkpoints" / "step-00000010"
    done.mkdir(parents=True)
    (done / "manifest.json").write_text("{}")
    again = submit(SRUN_CODE="75")
    assert f"-m lakh resume {tmp_path / 'run'} --set seed=3" in again.stdout
    assert again.returncode == 75
    assert "requeue 41" in again.stdout
    assert "requeue" not in submit(SRUN_CODE="2").stdout
