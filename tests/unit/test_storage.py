"""Writes are atomic, and a set is complete when its manifest exists."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from lakh import storage
from lakh.errors import DataError, DiskFull, MissingExtra, PeerLost, UserError


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "local":
        yield str(tmp_path)
        return
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


def test_bytes_survive_a_round_trip_through_any_url(base: str) -> None:
    url = storage.join(base, "folder", "file")
    storage.write_bytes(url, b"one")
    storage.write_bytes(url, b"two")
    assert storage.read_bytes(url) == b"two"
    assert storage.exists(url)
    assert storage.list_dir(storage.join(base, "folder")) == ["file"]
    with storage.open_read(url) as file:
        file.seek(1)
        assert file.read() == b"wo"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(base: str) -> None:
    url = storage.join(base, "file")
    storage.write_bytes(url, b"old")

    def fail_half_way() -> None:
        with storage.create(url) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert storage.read_bytes(url) == b"old"
    assert storage.list_dir(base) == ["file"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    storage.write_bytes(pipe, b"page")
    assert os.read(reader, 10) == b"page"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    storage.write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="no space left"):
        storage.commit(tmp_path, {"a": 1})
    assert list(tmp_path.iterdir()) == []
    assert not storage.is_complete(tmp_path)


def test_only_the_manifest_makes_a_set_complete(base: str) -> None:
    storage.write_bytes(storage.join(base, "part-0"), b"x")
    assert not storage.is_complete(base)
    with pytest.raises(UserError, match="make it with: lakh x"):
        storage.read_manifest(base, made_by="lakh x")
    storage.commit(base, {"parts": 1})
    assert storage.read_manifest(base, made_by="lakh x") == {"parts": 1}


def test_a_damaged_manifest_is_a_data_error(base: str) -> None:
    storage.write_bytes(storage.join(base, storage.MANIFEST), b"{trunc")
    with pytest.raises(DataError, match="damaged"):
        storage.read_manifest(base, made_by="lakh x")


def test_removing_a_set_removes_all_of_it(base: str) -> None:
    storage.write_bytes(storage.join(base, "set", "part"), b"x")
    storage.commit(storage.join(base, "set"), {})
    storage.remove_tree(storage.join(base, "set"))
    storage.remove_tree(storage.join(base, "set"))  # nothing left: fine
    assert storage.list_dir(storage.join(base, "set")) == []


def test_transient_failures_are_retried_with_growing_waits() -> None:
    waits: list[float] = []
    answers = iter([ConnectionError("503"), TimeoutError("slow"), "done"])

    def flaky() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert storage.retry(flaky, "read x", sleep=waits.append) == "done"
    assert waits == [0.2, 0.4]


def test_failed_and_slow_attempts_are_reported() -> None:
    now_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def request(answers: list[tuple[float, Exception | None]]) -> None:
        seconds, error = answers.pop(0)
        pass_time(seconds)
        if error is not None:
            raise error

    def attempt(*answers: tuple[float, Exception | None], size_bytes: int = 0) -> None:
        left = list(answers)
        storage.retry(lambda: request(left), "write x", size_bytes, sleep=pass_time, clock=lambda: now_s)

    found: list[storage.StorageDelay] = []
    with storage.observe_delays(found.append):
        attempt((1.0, None))
        attempt((4.0, None), size_bytes=100_000_000)  # 5 s are expected for them
        assert found == []
        attempt((0.5, ConnectionError("reset")), (2.0, None))
    assert found == [("write x", 0.5, 1, "ConnectionError: reset"), ("write x", pytest.approx(2.7), 2, "is slow")]
    attempt((9.0, None))
    assert len(found) == 2


def test_persistent_failures_exit_with_try_again() -> None:
    def broken() -> None:
        raise ConnectionError("503")

    with pytest.raises(PeerLost, match=r"read x: failed 5 times .*503"):
        storage.retry(broken, "read x", sleep=lambda s: None)


def test_a_missing_remote_file_is_not_retried() -> None:
    with pytest.raises(UserError, match="FileNotFoundError"):
        storage.read_bytes("memory://bucket/none")


def test_missing_files_and_unknown_protocols_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        storage.read_bytes(tmp_path / "none")
    with pytest.raises(UserError):
        storage.read_bytes("nosuch://x/y")
    with pytest.raises(UserError, match="not a local path"):
        storage.local_path("memory://x")


def test_a_protocol_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # fsspec remembers its imports
    with pytest.raises(MissingExtra, match=r"lakh\[s3\]"):
        storage.read_bytes("s3://bucket/key")


def test_space_is_checked_before_work_begins(tmp_path: Path) -> None:
    storage.require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(DiskFull, match="are free"):
        storage.require_space(tmp_path, 10**18)


def test_an_unwritable_path_is_named_as_given() -> None:
    for call in (lambda: storage.write_bytes("/proc/self/page.html", b""), lambda: storage.require_space("/proc/x", 1)):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.where in ("/proc/self/page.html", "/proc/x")
        assert ".part" not in str(caught.value)


def test_small_sizes_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=2_500_000))
    with pytest.raises(DiskFull, match=r"needs about 4\.00 MB and 2\.50 MB are free"):
        storage.require_space(tmp_path, 4_000_000)


def test_caches_belong_to_the_user_even_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/where")
    assert storage.cache_folder("rules") == Path("/where/lakh/rules")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert storage.cache_folder("rules") == Path("/home/me/.cache/lakh/rules")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a uid that nobody has
    assert storage.cache_folder("rules").parents[1].is_dir()


def test_two_processes_may_remove_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    remove = storage.shutil.rmtree

    def beside_another(path: Path) -> None:
        monkeypatch.setattr(storage.shutil, "rmtree", remove)
        (path / "a").rmdir()
        raise FileNotFoundError(path / "a")

    monkeypatch.setattr(storage.shutil, "rmtree", beside_another)
    storage.remove_tree(folder)
    assert not folder.exists()
    storage.remove_tree(folder)


def test_a_limit_on_the_size_of_files_is_a_clear_error(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from lakh import storage; from lakh.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: storage.write_bytes(sys.argv[1], bytes(5000))\n"
        "except UserError as error: print(error)"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "x")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "is larger than the limit on the size of a file; raise the limit (ulimit -f)" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_hashed_manifest_detects_its_own_damage(tmp_path: Path) -> None:
    digest = storage.commit(tmp_path, {"format": "x", "count": 7}, hashed=True)
    assert storage.read_manifest(tmp_path, made_by="x")[storage.MANIFEST_HASH] == digest
    manifest = tmp_path / storage.MANIFEST
    manifest.write_text(manifest.read_text().replace("7", "8"))
    with pytest.raises(DataError, match="does not match its own hash"):
        storage.read_manifest(tmp_path, made_by="x")


def test_files_that_a_killed_process_had_not_finished_are_removed(tmp_path: Path) -> None:
    storage.remove_parts(tmp_path / "missing")
    storage.remove_parts("s3://bucket/objects-appear-whole")
    storage.write_bytes(tmp_path / "kept", b"1")
    code = (
        f"import os; from lakh import storage\nwith storage.create({str(tmp_path / 'lost')!r}): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert len(list(tmp_path.iterdir())) == 2
    storage.remove_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_real_path_of_links_in_a_circle_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(tmp_path)
    assert storage.real_path(tmp_path / "loop") == tmp_path.resolve() / "loop"
    assert storage.real_path(f"file://{tmp_path}/link") == tmp_path.resolve()
