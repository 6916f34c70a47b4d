"""Health checks: every check finds its injected fault, decisions are the worst finding, counters are read."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakh.cli.main import cli
from lakh.errors import DataError
from lakh.health import CHECKS, HealthCheck, HealthFinding, HealthLedger, HealthReading, decide_health, evaluate_checks
from lakh.health.checks import XID_LEVELS
from lakh.health.decisions import REPEAT_OFFENCES, inject
from lakh.health.sources.kernel_log import count_xids
from lakh.health.sources.linux import read_linux
from lakh.health.sources.nvml import read_gpus


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_finds_its_injected_fault_and_no_other(check: HealthCheck) -> None:
    calm = [HealthReading("gpu0", "S1", other.metric, 1e6 if other.compare == "below" else 0) for other in CHECKS]
    assert all(finding.ok for finding in evaluate_checks(calm, calm))
    for readings in (calm, []):
        after, before = inject(check, readings, readings, "node")
        bad = [finding for finding in evaluate_checks(after, before) if not finding.ok]
        assert [finding.check for finding in bad] == [check.name]
        decision = decide_health(bad)
        assert decision.word == check.level
        assert check.reason in decision.reason


def test_a_high_counter_that_does_not_rise_is_healthy() -> None:
    old = [HealthReading("gpu0", "S1", "ecc_correctable", 5000)]
    assert all(finding.ok for finding in evaluate_checks(old, old))
    assert all(finding.ok for finding in evaluate_checks(old))  # the first reading has nothing to compare with
    new = [HealthReading("gpu0", "S1", "ecc_correctable", 5500)]
    [finding] = evaluate_checks(new, old)
    assert (finding.ok, finding.value) == (False, 500)


def finding(level: str, ok: bool = False, serial: str = "S1") -> HealthFinding:
    return HealthFinding("some-check", "gpu0", serial, ok, 1.0, level, f"reason of {level}")  # type: ignore[arg-type]


def test_the_worst_finding_decides() -> None:
    assert decide_health([]).word == "healthy"
    assert decide_health([finding("rma", ok=True)]).word == "healthy"
    decision = decide_health([finding("watch"), finding("drain"), finding("watch")])
    assert (decision.word, decision.reason) == ("drain", "gpu0: reason of drain")


def test_a_repeat_offender_is_sent_back() -> None:
    assert decide_health([finding("drain")], {"S1": REPEAT_OFFENCES - 2}).word == "drain"
    decision = decide_health([finding("drain")], {"S1": REPEAT_OFFENCES - 1, "S2": 9})
    assert decision.word == "rma"
    assert "drained 2 times before" in decision.reason


def test_the_ledger_counts_drains_by_serial_number(tmp_path: Path) -> None:
    ledger = HealthLedger(tmp_path / "sub" / "ledger.jsonl")
    assert ledger.drains() == {}
    ledger.append([finding("drain"), finding("watch"), finding("rma", serial="S2")], time_s=1.0, node="a")
    ledger.append([finding("drain"), finding("drain", ok=True)], time_s=2.0, node="b")
    assert ledger.drains() == {"S1": 2, "S2": 1}
    for content in (b"not json\n", b"\xc1\xff\n", b"[" * 100_000):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(DataError, match="is not a ledger"):
            HealthLedger(tmp_path / "bad").drains()


def test_xids_of_the_hardware_are_counted_and_those_of_applications_are_not() -> None:
    lines = [
        "[12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
        "[12.4] NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU fault",
        "[12.5] NVRM: Xid (PCI:0000:86:00): 64, Row remapper error",
        "[12.6] something else",
    ]
    found = {(r.device, r.metric): r.value for r in count_xids(lines, "node")}
    assert found["pci 0000:3b:00", "xid_drain"] == 1
    assert found["pci 0000:86:00", "xid_rma"] == 1
    assert found["node", "xid_watch"] == 0
    assert 31 not in XID_LEVELS


def test_counters_of_the_kernel_are_read_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    files = {
        "sys/class/net/eth0/carrier_down_count": "3\n",
        "sys/class/net/eth0/statistics/rx_errors": "5\n",
        "sys/class/net/eth0/statistics/tx_errors": "7\n",
        "sys/class/net/lo/carrier_down_count": "9\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "2\n",
        "sys/devices/system/edac/mc/mc0/ue_count": "1\n",
        "sys/devices/system/edac/mc/mc0/ce_count": "not a number\n",
        "proc/meminfo": "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:   250 kB\nHugePages_Total: 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {(r.device, r.metric): r.value for r in read_linux("node", tmp_path)}
    assert found == {
        ("eth0", "link_downs"): 3,
        ("eth0", "link_errors"): 12,
        ("mlx5_0/1", "link_downs"): 2,
        ("mc0", "host_ue"): 1,
        ("memory", "memory_free_share"): 0.25,
    }


def test_expected_gpus_that_are_not_there_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.health.sources.nvml.LIBRARY", "libdoes-not-exist.so")
    assert list(read_gpus("node")) == []
    [reading] = read_gpus("node", expected=8)
    assert (reading.metric, reading.value) == ("gpus_missing", 8)


def test_the_command_reports_checks_decision_and_reason(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    arguments = ["check", "--folder", str(tmp_path), "--inject", "row-remap-failure", "--ledger", str(ledger), "--json"]
    done = CliRunner().invoke(cli, ["health", *arguments], standalone_mode=False)
    assert done.return_value == 75
    data = json.loads(done.stdout.splitlines()[-1])
    assert data.keys() == {"checks", "decision", "reason"}
    assert data["decision"] == "rma"
    assert "could not be remapped" in data["reason"]
    assert {"disk-space", "clock-skew", "row-remap-failure"} <= {check["check"] for check in data["checks"]}
    assert json.loads(ledger.read_text())["check"] == "row-remap-failure"


def test_the_agent_drains_after_a_fault_and_signals_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number)))
    arguments = ["agent", "--folder", str(tmp_path), "--every", "0.1", "--drain-pid", "4242", "--json"]
    done = CliRunner().invoke(cli, ["health", *arguments, "--inject", "ecc-correctable"], standalone_mode=False)
    data = json.loads(done.stdout.splitlines()[-1])
    assert (done.return_value, data["rounds"], data["decision"]) == (75, 2, "drain")
    assert sent == [(4242, 15)]


def test_an_unknown_fault_gets_a_suggestion(tmp_path: Path) -> None:
    arguments = ["check", "--folder", str(tmp_path), "--inject", "row-remap-failur"]
    done = CliRunner().invoke(cli, ["health", *arguments], standalone_mode=False)
    assert "did you mean 'row-remap-failure'?" in str(done.exception)
