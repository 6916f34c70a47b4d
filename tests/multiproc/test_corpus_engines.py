"""The same corpus, byte for byte, from every engine: one process, several, Beam, and a Spark cluster of two workers."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lakh.corpus import Settings, build, pipeline, read_report
from lakh.corpus import build_plan as plan
from lakh.corpus.engines import local

SETTINGS = Settings(split_bytes=1_000_000, per_repo_bytes=700_000)
PATIENCE_S = 240  # everything here takes seconds on a machine that has time for it
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)
# Six JVMs that live for a minute: the optimising compiler would cost more than it gains.
QUICK_JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real code with copies: reformatted, slightly changed, in another repository."""
    root = tmp_path_factory.mktemp("library")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json", "asyncio", "email", "logging"):
        shutil.copytree(stdlib / name, root / "one" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted((root / "one" / "asyncio").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        copy = root / "two" / path.name
        copy.parent.mkdir(exist_ok=True)
        changed = "# a copy\n" + text if len(text) % 2 else text.replace("loop", "ring", 2) + "\nfinal = True\n"
        copy.write_text(changed, encoding="utf-8")
    (root / "two" / "key.py").write_text('password = "correct horse Battery 9 staple"\nmail = "jane@corp-mail.io"\n')
    return root


@pytest.fixture(scope="session")
def truth(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("truth") / "corpus"
    report = build(words(library), out, SETTINGS, workers=1)
    assert report.dropped["exact-duplicate"] > 3
    assert report.dropped["near-duplicate"] > 3
    assert report.dropped["over-repo-share"] > 3
    assert len(report.shards) > 1
    return out


def words(library: Path) -> list[str]:
    return [f"own:{library / name}" for name in ("one", "two")]


def build_command(library: Path, out: Path, *more: str) -> list[str]:
    sets = [f"--set={name}={getattr(SETTINGS, name)}" for name in ("split_bytes", "per_repo_bytes")]
    return [sys.executable, "-m", "lakh", "corpus", "build", *words(library), "--out", str(out), *sets, *more]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_several_processes_write_the_same_bytes_as_one(library: Path, truth: Path, tmp_path: Path) -> None:
    report = build(words(library), tmp_path / "out", SETTINGS, workers=2)
    assert contents(tmp_path / "out") == contents(truth)
    assert report.tasks["reused"] == 0
    assert report.peak_rss_bytes > 0


@pytest.mark.parametrize("workers", [1, 2], ids=["in-memory", "multi_processing"])
def test_beam_writes_the_same_bytes_as_the_local_engine(
    library: Path, truth: Path, tmp_path: Path, workers: int
) -> None:
    pytest.importorskip("apache_beam", reason="pip install 'lakh[beam]'")
    build(words(library), tmp_path / "out", SETTINGS, engine="beam", workers=workers)
    assert contents(tmp_path / "out") == contents(truth)


@contextlib.contextmanager
def spark_cluster(folder: Path) -> Iterator[str]:
    """A standalone master and two workers of one core each; gives the master's URL."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOG_DIR": str(folder),
        "PYSPARK_PYTHON": sys.executable,
        **QUICK_JAVA,
    }
    started = []

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as file:
            command = [str(home / "bin" / "spark-class"), *arguments]
            started.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        return log

    def wait_for(log: Path, pattern: str) -> str:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            found = re.search(pattern, log.read_text(errors="replace"))
            if found:
                return found[0]
            time.sleep(0.2)
        raise AssertionError(f"{pattern} not found in:\n{log.read_text(errors='replace')[-2000:]}")

    try:
        deploy = "org.apache.spark.deploy"
        log = start("master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = wait_for(log, r"spark://127\.0\.0\.1:\d+")
        for number in range(2):
            options = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0")
            log = start(f"worker{number}", f"{deploy}.worker.Worker", *options, master)
            wait_for(log, "Successfully registered with master")
        yield master
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=30)


@pytest.mark.slow
def test_a_spark_cluster_writes_the_same_bytes_as_the_local_engine(library: Path, truth: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pip install 'lakh[spark]'")
    if shutil.which("java") is None:
        pytest.skip("no java: apt-get install default-jre-headless")
    with spark_cluster(tmp_path) as master:
        options = [
            f"master={master}",
            "spark.driver.host=127.0.0.1",
            "spark.driver.bindAddress=127.0.0.1",
            "spark.cores.max=2",
            "spark.executor.cores=1",
            "spark.executor.memory=512m",
        ]
        # A process of its own: Java's launcher and Beam's gRPC threads do not share one well.
        command = build_command(library, tmp_path / "out", "--engine", "spark")
        command += [f"--engine-option={option}" for option in options]
        subprocess.run(command, check=True, timeout=2 * PATIENCE_S, env={**os.environ, **QUICK_JAVA})
    assert contents(tmp_path / "out") == contents(truth)


def test_components_found_in_rounds_equal_those_found_in_one_pass(
    library: Path, truth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.corpus.dedup.steps.MAX_EDGES_IN_ONE_TASK", 0)
    build(words(library), tmp_path / "out", SETTINGS, workers=1)
    assert contents(tmp_path / "out") == contents(truth)


def test_the_parts_of_an_array_job_write_the_same_bytes_as_one_build(
    library: Path, truth: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = build_command(library, out, "--workers", "1")
    parts = [subprocess.Popen([*command, "--part", f"{number}/3"]) for number in (2, 1, 0)]
    assert [part.wait(timeout=PATIENCE_S) for part in parts] == [0, 0, 0]
    assert contents(out) == contents(truth)


@pytest.mark.parametrize("place", ["plan", "step", "sum"])
def test_a_part_that_checks_after_the_others_have_ended_ends_too(
    library: Path, truth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The corpus is complete and its work folder removed, but this part had checked before that."""
    out = tmp_path / "out"
    shutil.copytree(truth, out)
    monkeypatch.setattr(pipeline, "_reusable", lambda *anything: None)
    if place != "plan":  # it still saw the plan, whose steps have left no marker since
        monkeypatch.setattr(
            plan, "_await_plan", lambda *anything: {"identity": anything[1], "num_splits": 1, "benchmarks": {}}
        )
    if place == "sum":  # and the markers too, up to where it reads what they name
        monkeypatch.setattr(local, "_await_members", lambda *anything: None)
    found = build(words(library), out, workers=1, member=(2, 3))
    assert found.output_sha256 == read_report(str(truth)).output_sha256
    assert not (out / ".work").exists()


def test_documents_of_an_earlier_corpus_are_excluded(library: Path, truth: Path, tmp_path: Path) -> None:
    plain = build([f"own:{library / 'two'}"], tmp_path / "plain", workers=1)
    later = build([f"own:{library / 'two'}"], tmp_path / "later", against=[str(truth)], workers=1)
    assert plain.kept > later.kept
    assert later.dropped["exact-duplicate"] + later.dropped["near-duplicate"] > plain.dropped.get("exact-duplicate", 0)
    details = pq.read_table(tmp_path / "later" / "dropped-00000.parquet").column("detail").to_pylist()
    assert any(detail.startswith("of one/asyncio/") for detail in details)
