"""deploy/prometheus and deploy/grafana with a real Prometheus: it scrapes a run and a server, and alerts fire."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "lakh.rules.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
START_S = 180.0
STOPPED_AT = 30  # the step that rank 1 does not begin; both ranks have finished this many
ABSENT = {
    *("lakh:gateway_replicas", "lakh:gateway_failovers_total", "lakh:store_up"),  # of a gateway and of Redis
    *("lakh_mfu_ratio", "lakh_step_sent_bytes"),  # of GPUs, and of a cluster with several tiers
}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return found


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))


def series(expression: str) -> set[str]:
    """Names of the recorded rules and metrics in an expression."""
    return set(re.findall(r"\b(?:lakh[:_][a-z0-9_:]+|process_start_time_seconds|up)\b(?!\()", expression))


class Prometheus:
    """Scrapes `targets` (job -> HOST:PORT) each half second, with the rules of deploy/ but without their delays."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        rules = yaml.safe_load(RULES.read_text())
        for group in rules["groups"]:
            for rule in group["rules"]:
                rule.pop("for", None)
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        scrapes = [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()]
        often = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config = {"global": often, "rule_files": ["rules.yml"], "scrape_configs": scrapes}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
            command = [program("prometheus"), *words, "--web.listen-address=127.0.0.1:0"]
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        self._url = ""

    def url(self) -> str:
        """Prometheus does not say which port it got; the kernel does."""
        until_s = time.monotonic() + START_S
        while not self._url:
            is_late = self.process.poll() is not None or time.monotonic() > until_s
            assert not is_late, self._log.read_text()[-2000:]
            port = _listening_port(self.process.pid)
            with contextlib.suppress(OSError):  # 503 until its database is open
                if port is not None:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=10).read()
                    self._url = f"http://127.0.0.1:{port}/api/v1"
            time.sleep(0.1)
        return self._url

    def get(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(f"{self.url()}/{path}?{urllib.parse.urlencode(words)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> float:
        found = self.get("query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else float("nan")

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()


def _listening_port(pid: int) -> int | None:
    """The TCP port on which a process listens, from /proc."""
    with contextlib.suppress(OSError):
        links = [path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()]
        inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                return int(words[1].rpartition(":")[2], 16)
    return None


def wait_until(is_true: Callable[[], bool], what: Callable[[], object], timeout_s: float = START_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < until_s, what()
        time.sleep(0.2)


def test_rules_and_their_examples_pass_promtool() -> None:
    for words in (
        ["check", "rules", str(RULES)],
        ["test", "rules", str(Path(__file__).parent / "lakh.rules.test.yml")],
    ):
        done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_passes_promtool() -> None:
    config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    done = subprocess.run(
        [program("promtool"), "check", "config", str(config)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for rule in (rule for rule in rules if "alert" in rule):
        assert rule["labels"]["severity"] in ("warning", "critical"), rule
        assert set(rule["annotations"]) == {"summary", "action"}, rule


def test_panels_have_a_place_and_a_source() -> None:
    for path in DASHBOARDS:
        page = json.loads(path.read_text())
        panels = page["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(cells)) == len(cells), f"{path.name}: panels overlap"
        assert max(x for x, _ in cells) < 24
        assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${source}"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prometheus_scrapes_a_run_and_a_server_and_alerts_fire(
    tiny_recipe: Path, tmp_path: Path, served_model: Path
) -> None:
    """A rank that is stopped fires LakhRunStalled; a server that is killed fires LakhServerDown."""
    program("prometheus")
    run_dir = tmp_path / "run"
    sets = {"train.steps": 100000, "train.eval_every": 0, "train.sinks": '["prometheus"]', "train.prometheus_port": 0}
    sets["train.peer_timeout_s"] = 600  # the run stays stalled until the test ends
    words = ["train", str(tiny_recipe), "--out", str(run_dir), "--nproc", "2"]
    words += ["--fault", f"stop(rank=1, step={STOPPED_AT})"]
    words += [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    served = ["serve", str(served_model), "--http", "127.0.0.1:0", "--threads", "1", "--cache", "off", "--json"]
    with contextlib.ExitStack() as stack:
        server = _start(stack, served, stdout=subprocess.PIPE)
        run = _start(stack, words, stderr=(tmp_path / "run.log").open("wb"))
        port_file = run_dir / "prometheus.json"

        def log() -> str:
            last = sorted((run_dir / "events").glob("*.jsonl"))[:1]
            return (tmp_path / "run.log").read_text()[-2000:] + "".join(path.read_text()[-1000:] for path in last)

        wait_until(lambda: port_file.exists() or run.poll() is not None, log)
        url = json.loads(server.stdout.readline())["url"]
        targets = {"lakh-train": f"127.0.0.1:{json.loads(port_file.read_text())['port']}", "lakh-serve": url[7:]}
        prometheus = Prometheus(tmp_path, targets)
        stack.callback(prometheus.stop)

        body = json.dumps({"prompt": "def add(", "max_tokens": 4}).encode()
        for _ in range(3):
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=30).read()
        wait_until(lambda: prometheus.value('lakh:requests_total{code="200"}') == 3, lambda: prometheus.get("targets"))
        wait_until(  # then rank 0 waits for the stopped rank 1
            lambda: prometheus.value("lakh_step") == STOPPED_AT,
            lambda: f"lakh_step is {prometheus.value('lakh_step')}\n{log()}",
        )
        assert 0 < prometheus.value("lakh_step_seconds_count") <= STOPPED_AT
        assert prometheus.value("lakh_ranks") == 2
        wait_until(lambda: "LakhRunStalled" in prometheus.firing(), log)
        assert prometheus.value("lakh_step") == STOPPED_AT, "the run went on although a rank is stopped"
        assert "LakhServerDown" not in prometheus.firing()

        names = set(prometheus.get("label/__name__/values"))
        needed = set().union(*map(series, expressions()))
        assert needed - recorded() - ABSENT <= names, "the rules or dashboards use metrics that nothing exports"
        for expression in expressions():
            query = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
            prometheus.get("query", query=query)  # raises for an expression that Prometheus does not understand

        server.send_signal(signal.SIGKILL)
        wait_until(lambda: "LakhServerDown" in prometheus.firing(), lambda: prometheus.get("alerts"))


def recorded() -> set[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def _start(stack: contextlib.ExitStack, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", "lakh", *words], **options)

    def stop() -> None:
        for _ in range(2):  # the second signal stops a run at once, though a rank of it is stopped
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        process.kill()
        process.wait(10)

    stack.callback(stop)
    return process
