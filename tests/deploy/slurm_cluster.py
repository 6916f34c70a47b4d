"""A real Slurm on this machine: munged, slurmctld and one slurmd, in a folder and on ports of its own.

    with SlurmCluster.start(cpus=2) as cluster:
        job = cluster.sbatch("--wrap", "hostname")
        cluster.wait_for(job, "COMPLETED", timeout_s=20)

The partition "batch" is preempted by "urgent": its jobs get SIGTERM, GRACE_S later SIGKILL, and are requeued. The GPUs
of the node are empty files. Nothing of this is in /etc, so that an installed Slurm is not touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["GRACE_S", "SlurmCluster"]

START_S = 30.0
COMMAND_S = 20.0
GRACE_S = 60
PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}

CONFIG = """
ClusterName=lakh
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2
KillWait=10
MinJobAge=300
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1024 Gres=gpu:{gpus}
PartitionName=batch Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes={host} PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    @classmethod
    @contextlib.contextmanager
    def start(cls, *, cpus: int, gpus: int = 0) -> Iterator[SlurmCluster]:
        missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
        if missing:
            pytest.skip(f"no Slurm: apt-get install {' '.join(missing)}")
        if os.geteuid() != 0:
            pytest.skip("needs root: slurmd starts jobs for other users")
        folder = Path(tempfile.mkdtemp(prefix="lakh-slurm-"))
        folder.chmod(0o755)  # munged asks for a folder that every user can enter
        daemons: list[subprocess.Popen[bytes]] = []
        cluster = cls(folder)
        try:
            cluster._configure(cpus=cpus, gpus=gpus)
            munge = ["munged", "--foreground", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge.key"]
            munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
            try:
                for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
                    daemons.append(cluster._daemon(command))
                cluster._wait_until_idle(daemons)
            except AssertionError as error:
                if os.environ.get("LAKH_REQUIRE_SYSTEM_PACKAGES"):
                    raise
                pytest.skip(f"Slurm does not start on this machine: {str(error).splitlines()[0]}")
            yield cluster
        finally:
            cluster._cancel_jobs()
            for daemon in reversed(daemons):
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
            shutil.rmtree(folder, ignore_errors=True)

    def sbatch(self, *arguments: str, **environment: str) -> int:
        """Submit a job and return its number."""
        return int(self.command("sbatch", "--parsable", *arguments, **environment).strip())

    def state(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        shown = self.command("scontrol", "show", "--oneliner", "job", str(job))
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for(self, job: int, state: str, *, timeout_s: float) -> dict[str, str]:
        until_s = time.monotonic() + timeout_s
        while (found := self.state(job))["JobState"] != state:
            assert time.monotonic() < until_s, f"job {job} is {found['JobState']}, not {state}: {found}"
            assert found["JobState"] not in ("FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"), found
            time.sleep(0.1)
        return found

    def command(self, *words: str, **environment: str) -> str:
        variables = {**self.environment, **environment}
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}\n{self._log('slurmctld')}"
        return done.stdout

    def _configure(self, *, cpus: int, gpus: int) -> None:
        host = socket.gethostname().partition(".")[0]
        controller_port, node_port = _free_ports(2)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host, folder=self.folder, cpus=cpus, gpus=gpus, grace_s=GRACE_S,
                controller_port=controller_port, node_port=node_port,
            )
        )  # fmt: skip
        devices = [self.folder / f"gpu{number}" for number in range(gpus)]
        for device in devices:
            device.touch()  # gpus need a file each
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _daemon(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out").open("wb") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        if command[0] == "munged":
            _wait(lambda: (self.folder / "munge.sock").exists(), "munged made no socket", daemon)
        return daemon

    def _wait_until_idle(self, daemons: list[subprocess.Popen[bytes]]) -> None:
        def is_idle() -> bool:
            asked = subprocess.run(
                ["sinfo", "--noheader", "--format=%T", "--partition=batch"],
                env=self.environment, capture_output=True, text=True, timeout=COMMAND_S, check=False,
            )  # fmt: skip
            return asked.stdout.strip() == "idle"

        _wait(is_idle, lambda: f"the node is not idle\n{self._log('slurmctld')}\n{self._log('slurmd')}", *daemons)

    def _cancel_jobs(self) -> None:
        """End what a failed test has left, so that no rank outlives its cluster."""
        for command in (["scancel", "--full", "--signal=KILL", "--user=root"], ["scancel", "--user=root"]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=self.environment, capture_output=True, timeout=COMMAND_S, check=False)

    def _log(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def _wait(is_done, problem, *daemons: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while not is_done():
        ended = [daemon.args[0] for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > until_s:
            text = problem() if callable(problem) else problem
            raise AssertionError(f"{text}; ended: {ended}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that are free now. Slurm cannot take port 0."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
