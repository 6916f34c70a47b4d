from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lakh.cli.corpus import ENGINES, corpus
from lakh.cli.main import COMMANDS
from lakh.corpus import engines


def test_build_ends_with_one_json_document(
    lakh: Callable[..., Any], last_line: Callable[..., Any], tree: Callable[..., Path], tmp_path: Path
) -> None:
    root, out = tree("proj", {"a.py": "x = 1\n", "b.py": "x = 1\n\n", "c.md": "hi"}), tmp_path / "out"
    code, stdout, _ = lakh("corpus", "build", f"own:{root}", "--out", str(out), "--json")
    data = last_line(stdout)
    assert code == 0
    assert data["dropped"] == {"exact-duplicate": 1, "not-code": 1}
    assert (data["read"], data["kept"], data["duplicates"]) == (3, 1, {"exact": 1, "near": 0})
    expected = "bytes_in bytes_out licences languages seconds cpu_seconds mb_per_cpu_second output_sha256 out reused"
    assert set(expected.split()) <= set(data)
    assert last_line(lakh("corpus", "build", f"own:{root}", "--out", str(out), "--json")[1])["reused"] is True


def test_report_and_show_print_text(
    lakh: Callable[..., Any], last_line: Callable[..., Any], tree: Callable[..., Path], tmp_path: Path
) -> None:
    root, out = tree("proj", {"a.py": "x = 1\n", "b.py": ""}), str(tmp_path / "out")
    lakh("corpus", "build", f"own:{root}", "--out", out)
    code, stdout, _ = lakh("corpus", "report", out, "--verify")
    assert code == 0
    assert "2 files match their manifest" in stdout
    assert lakh("corpus", "show", out, "proj/a.py") == (0, "x = 1\n\n", "")
    assert "was dropped: empty" in lakh("corpus", "show", out, "proj/b.py")[1]
    assert last_line(lakh("corpus", "show", out, "proj/b.py", "--json")[1])["kept"] is False


def test_errors_have_an_exit_code_and_a_remedy(
    lakh: Callable[..., Any], last_line: Callable[..., Any], tree: Callable[..., Path], tmp_path: Path
) -> None:
    root, out = tree("proj", {"a.py": "x = 1\n"}), tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert lakh("corpus", "build", f"own:{tmp_path / 'empty'}", "--out", str(out))[0] == 2
    assert lakh("corpus", "build", "--out", str(out))[0] == 2
    code, stdout, stderr = lakh("corpus", "report", str(out), "--json")
    assert code == 2
    assert last_line(stdout)["error"]["kind"] == "UserError"
    assert "lakh corpus build" in stderr
    (tmp_path / "empty" / "manifest.json").write_text('{"format": "lakh-tokens/1"}')
    assert lakh("corpus", "report", str(tmp_path / "empty"))[0] == 2  # the wrong folder, not a damaged one
    lakh("corpus", "build", f"own:{root}", "--out", str(out))
    assert lakh("corpus", "build", f"own:{root}", "--out", str(out), "--max-bytes-per-repo", "3")[0] == 2
    assert "did you mean" in lakh("corpus", "build", f"own:{root}", "--out", str(out), "--set", "filter.x=1")[2]
    (out / "docs-00000.parquet").write_bytes(b"")
    assert lakh("corpus", "report", str(out), "--verify")[0] == 65


def test_help_matches_the_command_table() -> None:
    assert (corpus.help or "").splitlines()[0] == COMMANDS["corpus"][1]


def test_command_lists_all_engines() -> None:
    assert engines.ENGINES == ENGINES


def test_code_without_a_licence_is_dropped_and_the_report_says_how_to_take_it(
    lakh: Callable[..., Any], last_line: Callable[..., Any], tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = tree("proj", {"a.py": "def f(a):\n    return a + 1\n"})
    stdout = lakh("corpus", "build", str(root), "--out", str(tmp_path / "out"))[1]
    assert "dropped: licence" in stdout
    assert "own:SRC" in stdout
    assert "nothing was kept" in stdout
    own = "# SPDX-License-Identifier: GPL-3.0-only\n"
    root = tree("mine", {"a.py": "def f(a):\n    return a + 1\n", "b.py": own + "def g(a):\n    return a - 1\n"})
    made = last_line(lakh("corpus", "build", f"own:{root}", "--out", str(tmp_path / "mine-out"), "--json")[1])
    assert (made["kept"], made["dropped"]) == (1, {"licence": 1})  # a notice in a file counts


def test_the_report_lists_the_largest_groups_of_duplicates(
    lakh: Callable[..., Any], last_line: Callable[..., Any], tree: Callable[..., Path], tmp_path: Path
) -> None:
    copies = {f"{name}{number}.py": f"{name} = 1\n" + "\n" * number for name in "xy" for number in range(3)}
    root, out = tree("proj", {**copies, "y9.py": "y = 1  # the same\n", "z.py": "z = 1\n"}), str(tmp_path / "out")
    lakh("corpus", "build", f"own:{root}", "--out", out)
    page = tmp_path / "page.html"
    code, stdout, _ = lakh("corpus", "report", out, "--html", str(page), "--json")
    assert code == 0
    first, second = last_line(stdout)["duplicate_clusters"]
    assert (first["place"][:6], first["exact"], first["near"], len(first["members"])) == ("proj/y", 3, 0, 3)
    assert {first["place"], *first["members"]} == {f"proj/y{number}.py" for number in (0, 1, 2, 9)}
    assert (second["place"][:6], second["exact"]) == ("proj/x", 2)
    assert first["members"][0] in page.read_text()
