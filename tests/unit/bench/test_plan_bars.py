"""`lakh bench plan --bars`: every target has a row, and a row that misses its target says so."""

from bench.plan import bars
from bench.plan.bars import BarScale, bench_bars


def test_every_target_has_a_row() -> None:
    logged: list[str] = []
    rows = bench_bars(BarScale(most=3072, some=1024, zone=1024, rack_jobs=128, across=False), logged.append)
    named = {row["what"].split(",")[0].split(":")[0]: row for row in rows}
    assert {"ring over 3", "exact traffic engineering", "peak memory of this process"} <= named.keys()
    assert len(rows) == 3 + 3 + 4 + 1 + 1
    assert logged
    by_name = {row["what"]: row for row in rows}
    # what does not depend on the speed of the machine
    assert by_name["exact traffic engineering, 3,072 GPUs: flows on the fullest uplink of a leaf"]["value"] == 1
    assert all(row["met"] for name, row in by_name.items() if "published" in name), rows


def test_a_missed_target_is_shown() -> None:
    assert not bars._below("slow", 2.0, 1.0, "s")["met"]
    assert not bars._above("small", 0.2, 0.3, "")["met"]
    assert bars._above("equal", 0.3, 0.3, "")["met"]
