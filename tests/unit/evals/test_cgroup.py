"""Total memory of a worker: limited by a control group, or polled where none can be made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.evals.sandbox import Program, Sandbox, SandboxLimits, cgroup
from lakh.evals.sandbox.backends import bubblewrap

HOARD = """
import os, time
def answer():
    for _ in range(6):
        if os.fork() == 0:
            kept = [b"x" * (1 << 20) for _ in range(200)]
            time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def parent() -> cgroup.ControlGroupParent:
    found = cgroup.find()
    if found is None:
        pytest.skip("no control groups of version 2 can be made here (they need root, or a part of the tree)")
    return found


def check_total_memory(box: Sandbox) -> None:
    limits = SandboxLimits(cpu_s=5, wall_s=60, memory_MiB=256)
    assert box.run(Program("def answer(): return 42", "assert answer() == 42", names=("answer",)), limits).passed
    verdict = box.run(Program(HOARD, "answer()", names=("answer",)), limits)
    assert (verdict.kind, verdict.detail) == ("memory", "all processes together hold more than 512 MiB")


def test_a_group_limits_the_memory_of_all_processes_together(
    parent: cgroup.ControlGroupParent, sandbox: Sandbox, alive: Callable[[Sandbox], list[int]]
) -> None:
    with Sandbox(bubblewrap.Bubblewrap(), parent) as box:
        assert "+cgroup (" in box.description
        check_total_memory(box)
    assert alive(sandbox) == []
    mine = f"{cgroup.PREFIX}{os.getpid()}-*"
    left = [path for path in parent.folder.glob(mine) if not (path / "cgroup.procs").read_text()]
    kept = {worker._group.folder.name for worker in sandbox._idle if worker._group}
    assert [path for path in left if path.name not in kept] == []


def test_without_a_group_polling_limits_total_memory(sandbox: Sandbox, alive: Callable[[Sandbox], list[int]]) -> None:
    """As with control groups of version 1, and for users who cannot make groups."""
    with Sandbox(bubblewrap.Bubblewrap(), None) as box:
        assert "+cgroup" not in box.description
        check_total_memory(box)
    assert alive(sandbox) == []


def test_children_of_a_member_are_members(parent: cgroup.ControlGroupParent) -> None:
    group = parent.make(64, 8)
    try:
        with subprocess.Popen(["/bin/sh", "-c", "sleep 30 & sleep 30 & wait"]) as shell:
            try:
                group.add(shell.pid)
                assert str(shell.pid) in (group.folder / "cgroup.procs").read_text().split()
            finally:
                for pid in (group.folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)
    finally:
        group.remove()
    assert not group.folder.exists()


def test_groups_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/true"]) as ended:
        pass
    left, ours = (tmp_path / f"{cgroup.PREFIX}{pid}-0" for pid in (ended.pid, os.getpid()))
    left.mkdir()
    ours.mkdir()
    cgroup.ControlGroupParent(tmp_path).sweep()
    assert not left.exists()
    assert ours.exists()


def test_a_sibling_group_is_made_if_the_parent_has_both_controllers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a user session of systemd: our own folder has processes, so its children can have no limits."""
    monkeypatch.setattr(cgroup, "_works", lambda parent: True)
    session = tmp_path / "two" / "user.slice" / "app.slice"
    own = session / "shell.scope"
    own.mkdir(parents=True)
    for folder, controllers in ((session, "cpu memory pids"), (own, ""), (tmp_path / "two", "cpu")):
        (folder / "cgroup.subtree_control").write_text(controllers)
        (folder / "cgroup.procs").write_text("")
    (tmp_path / "own").write_text("0::/user.slice/app.slice/shell.scope\n")
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path / 'two'} cgroup2 rw 0 0\n")
    assert cgroup.find(tmp_path / "own", tmp_path / "mounts") == cgroup.ControlGroupParent(session)
    (session / "cgroup.subtree_control").write_text("cpu")
    assert cgroup.find(tmp_path / "own", tmp_path / "mounts") is None


def test_limits_are_written_and_oom_kills_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, str] = {}
    monkeypatch.setattr(cgroup, "_write", lambda path, text: written.update({path.name: text}))
    group = cgroup.ControlGroupParent(tmp_path).make(64, 8)
    assert written == {"memory.max": str(64 << 20), "memory.swap.max": "0", "pids.max": "8"}
    assert group.oom_kills() == 0
    (group.folder / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 2\n")
    assert group.oom_kills() == 2
