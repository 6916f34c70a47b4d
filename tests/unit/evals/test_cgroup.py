"""A cell's control group: what all its processes hold together, by the kernel's count."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.evals.sandbox.backends import bubblewrap
from lakh.evals.sandbox import cgroup
from lakh.evals.sandbox import SandboxLimits, Sandbox
from lakh.evals.task import Program

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
def tree() -> cgroup.ControlGroupParent:
    found = cgroup.find()
    if found is None:
        pytest.skip("control groups cannot be made here (they need root, or a part of the tree given to this user)")
    return found


def test_six_processes_are_stopped_at_what_they_hold_together(
    tree: cgroup.ControlGroupParent, sandbox: Sandbox, alive: Callable[[Sandbox], list[int]]
) -> None:
    with Sandbox(bubblewrap.Bubblewrap(bubblewrap.find() or ""), tree) as walls:
        assert "+cgroup (" in walls.description
        limits = SandboxLimits(cpu_s=5, wall_s=60, memory_MiB=256)
        assert walls.run(Program("def answer(): return 42", "assert answer() == 42", names=("answer",)), limits).passed
        verdict = walls.run(Program(HOARD, "answer()", names=("answer",)), limits)
        assert (verdict.kind, verdict.detail) == ("memory", "all processes together hold more than 512 MiB")
    assert alive(sandbox) == []
    mine = f"{cgroup.PREFIX}{os.getpid()}-*"
    left = [path for folder in tree.folders for path in folder.glob(mine) if not (path / "cgroup.procs").read_text()]
    kept = {folder.name for cell in sandbox._idle if cell._group for folder in cell._group.folders}
    assert [path for path in left if path.name not in kept] == []


def test_whoever_is_born_below_a_member_is_one(tree: cgroup.ControlGroupParent) -> None:
    group = tree.make(64, 8)
    try:
        with subprocess.Popen(["/bin/sh", "-c", "sleep 30 & sleep 30 & wait"]) as shell:
            try:
                group.take(shell.pid)
                members = (group.memory / "cgroup.procs").read_text().split()
                assert str(shell.pid) in members
            finally:
                for pid in (group.memory / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)
    finally:
        group.remove()
    assert not group.memory.exists()


def test_groups_of_a_dead_maker_are_swept(tree: cgroup.ControlGroupParent) -> None:
    with subprocess.Popen(["/bin/true"]) as ended:
        pass
    left = [folder / f"{cgroup.PREFIX}{ended.pid}-0" for folder in tree.folders]
    for folder in left:
        folder.mkdir()
    tree.sweep()
    assert not any(folder.exists() for folder in left)


def test_a_sibling_is_made_where_the_parent_gives_both_controllers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd gives it to a user's session: our own folder has processes, so its children could have no limits."""
    monkeypatch.setattr(cgroup, "_proven", lambda tree: tree)
    session = tmp_path / "two" / "user.slice" / "app.slice"
    own = session / "shell.scope"
    own.mkdir(parents=True)
    for folder, controllers in ((session, "cpu memory pids"), (own, ""), (tmp_path / "two", "cpu")):
        (folder / "cgroup.subtree_control").write_text(controllers)
        (folder / "cgroup.procs").write_text("")
    (tmp_path / "own").write_text("0::/user.slice/app.slice/shell.scope\n")
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path / 'two'} cgroup2 rw 0 0\n")
    assert cgroup.find(tmp_path / "own", tmp_path / "mounts") == cgroup.ControlGroupParent(2, session, session)
    (session / "cgroup.subtree_control").write_text("cpu")
    assert cgroup.find(tmp_path / "own", tmp_path / "mounts") is None


def test_killings_are_read_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 2\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert cgroup.Group(2, tmp_path, tmp_path).killings() == 2
    assert cgroup.Group(1, tmp_path, tmp_path).killings() == 3
    assert cgroup.Group(2, tmp_path / "none", tmp_path).killings() == 0
