from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.document import complete
from lakh.corpus.filters.coverage import read_coverage
from lakh.corpus.filters.quality import QualitySettings, has_assertions, quality_filter, quality_reason
from lakh.corpus.filters.syntax import GRAMMARS, PARSED_BYTES, error_share, parser_of
from lakh.corpus.parsing.text_features import text_features_filter
from lakh.errors import ConfigError, DataError

FEATURES = text_features_filter(NearDedupSettings())

GOOD = {
    "python": "def f(a):\n    return a + 1\n",
    "javascript": "function f(a) { return a + 1 }\n",
    "typescript": "function f(a: number): number { return a + 1 }\n",
    "java": "class A { int f(int a) { return a + 1; } }\n",
    "go": "package a\n\nfunc f(a int) int { return a + 1 }\n",
    "rust": "fn f(a: i32) -> i32 { a + 1 }\n",
    "c": "int f(int a) { return a + 1; }\n",
    "cpp": "namespace n { template <class T> T f(T a) { return a + 1; } }\n",
}
PROSE = "this is a plain letter; it has (no code at all, and } brackets [ that do not fit !! \n"


@pytest.mark.parametrize("language", sorted(GOOD))
def test_code_has_no_error_bytes_and_prose_has_many(language: str) -> None:
    assert parser_of(language) is not None
    good = error_share(GOOD[language].encode() * 20, language)
    bad = error_share(PROSE.encode() * 20, language)
    assert good <= 0.02 < 0.2 < bad


def test_one_broken_line_does_not_drop_a_file() -> None:
    text = GOOD["python"] * 30 + "def broken(:\n" + GOOD["python"] * 30
    assert 0 < error_share(text.encode(), "python") < 0.05


def test_header_that_is_not_c_is_tried_as_cpp() -> None:
    text = (
        b"class A : public B<int> { public: A() = default; virtual ~A() noexcept(false); T operator()(U&& u) const; };\n"  # noqa: E501
        * 9
    )
    assert error_share(text, "c", "a.h") < 0.02 < 0.1 < error_share(text, "c", "a.c")


def test_tsx_has_its_own_grammar() -> None:
    text = b"const a = <div className='x'>it's {b}</div>;\n" * 5
    assert error_share(text, "typescript", "a.tsx") == 0


def test_long_file_is_judged_by_its_beginning_unless_that_looks_bad() -> None:
    clean = GOOD["python"] * (2 * PARSED_BYTES // len(GOOD["python"]))
    assert error_share(clean.encode(), "python") < 0.01
    in_a_string = 'x = """\n' + "it's text }{\n" * (2 * PARSED_BYTES // 13) + '"""\n'  # cut in the middle of a string
    assert error_share(in_a_string.encode(), "python") < 0.01


@pytest.mark.parametrize(
    ("language", "piece"), [("java", "a<"), ("rust", "\"'"), ("python", "a?b:"), ("go", "a?b:"), ("c", "(")]
)
def test_hostile_text_cannot_block_a_parser(language: str, piece: str) -> None:
    begin = time.process_time()
    error_share(piece.encode() * (8_000 // len(piece)), language, cpu_s=0.5)
    assert time.process_time() - begin < 60  # without limits, minutes


@given(st.binary(max_size=200), st.sampled_from([*sorted(GRAMMARS), "lua", ""]))
def test_error_share_accepts_any_bytes(data: bytes, language: str) -> None:
    assert 0 <= error_share(data, language) <= 1


def test_quality_reason_names_share_limit_and_language() -> None:
    found = quality_reason(language="python", error=0.5, comment=0, string=0, number=0)
    assert found == "50% syntax errors, over 5% for python"
    assert quality_reason(language="c", error=0.2, comment=0, string=0, number=0) == ""
    assert quality_reason(language="lua", error=0, comment=0.95, string=0, number=0)
    assert quality_reason(language="markdown", error=0, comment=0.95, string=0, number=0) == ""


def run(rows: list[tuple[str, str, str]], settings: QualitySettings) -> list[dict]:
    columns = zip(*rows, strict=True)
    batch = complete(pa.record_batch(dict(zip(("path", "language", "text"), map(list, columns), strict=True))))
    return quality_filter(settings)(FEATURES(batch)).to_pylist()


def test_filter_drops_and_tags() -> None:
    rows = [
        ("a.py", "python", GOOD["python"]),
        ("tests/test_a.py", "python", "def test_a():\n    assert f(1) == 2\n"),
        ("b.py", "python", PROSE * 9),
        ("c.py", "python", "# " + "words " * 300 + "\nx = 1\n"),
        ("d.py", "python", "x = [" + "123456, " * 300 + "]\n"),
    ]
    made = run(rows, QualitySettings())
    assert [row["reason"] for row in made] == ["", "", "low-quality", "low-quality", "low-quality"]
    assert [row["marks"] for row in made[:2]] == ["", "test asserts"]
    assert made[2]["detail"].endswith("for python")
    assert [row["reason"] for row in run(rows[:2], QualitySettings(drop_tests=True))] == ["", "low-quality"]
    assert all(not row["reason"] for row in run(rows, QualitySettings(enabled=False)))


def test_coverage_reports_tag_their_files(tmp_path: Path) -> None:
    xml = tmp_path / "coverage.xml"
    xml.write_text('<coverage><class filename="a.py" line-rate="0.835"/></coverage>')
    lcov = tmp_path / "lcov.info"
    lcov.write_text("SF:b.js\nDA:1,4\nDA:2,0\nend_of_record\n")
    assert read_coverage(str(xml)) == {"a.py": 0.835}
    assert read_coverage(str(lcov)) == {"b.js": 0.5}
    batch = complete(pa.record_batch({"repo": ["r"], "path": ["a.py"], "language": ["python"], "text": ["x = 1\n"]}))
    made = quality_filter(QualitySettings(coverage=(f"r={xml}",)))(FEATURES(batch)).to_pylist()
    assert made[0]["marks"] == "covered=0.83" or made[0]["marks"] == "covered=0.84"
    with pytest.raises(ConfigError, match="coverage"):
        QualitySettings(coverage=("coverage.xml",))


@pytest.mark.parametrize(
    "text", ["hello", "<a/>", "<broken", '<!DOCTYPE x [<!ENTITY a "b">]><coverage/>', "<!DOCTYPE x [ ]><coverage/>"]
)
def test_file_that_is_not_a_coverage_report_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.xml"
    file.write_text(text)
    with pytest.raises(DataError):
        read_coverage(str(file))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    assert x == 1", True),
        ("self.assertEqual(a, b)", True),
        ("assert_eq!(a, b);", True),
        ("  expect (value).toBe(1)", True),
        ("x.should.equal(1)", True),
        ("REQUIRE( a )", True),
        ("EXPECT_EQ(a, b);", True),
        ('t.Fatalf("no")', True),
        ('t.Error("no")', True),
        ("reassert(x)", False),
        ("we expect nothing; unexpected(1)", False),
        ("x.shoulder", False),
        ("PREREQUIRE(1)", False),
        ('at.Error("x")', False),
        ("assertions", False),
    ],
)
def test_assertions_are_detected_by_form(text: str, expected: bool) -> None:
    assert has_assertions(f"line\n{text}\nline\n") is expected
