from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.document import STREAM, complete
from lakh.corpus.parsing.languages import LANGUAGES
from lakh.corpus.parsing.text_features import text_features, text_features_filter, tokens_of

FEATURES = text_features_filter(NearDedupSettings())

# language, a text, the same code in another layout
SAME = [
    ("python", "def f(a, b):\n  return a  # sum\n", "def f(\n    a,\n    b,\n):\n\n    # why\n    return a\n"),
    ("python", "x = [1,\n  2]\n", "x = [1, 2,]\n"),
    ("python", "if a:\n\tb()\n\tc()\n", "if a:\n        b()\n\n        c()\n"),
    ("python", "a = 1 + \\\n    2\n", "a = 1 + 2\n"),
    ("python", "x = f'{a['b']}'\n", "x = f'{a['b']}'  # new f-string\n"),
    (
        "javascript",
        "let a=/[/]'\"/g; // c\nf(`x${ {a:'}'}[b] }y`)",
        "let a = /[/]'\"/g\n;\nf(`x${ {a:'}'}[b] }y`) /* c */",
    ),
    ("javascript", "a = b / c / d", "a = b/c/d"),
    ("javascript", "f(a, b)", "f(\n  a,\n  b,\n)"),
    ("typescript", "const x: Map<string, A<B>> = y", "const x : Map < string , A < B > > = y"),
    ("java", 'String s = """\n  // not a comment\n  """; /* c */', 'String s =\n"""\n  // not a comment\n  """;'),
    ("go", "x := `// raw` // c\nf(a,\n)", "x := `// raw`\nf(a)"),
    ("rust", "fn f<'a>(x: &'a str) -> char { '\\'' } /* /* nested */ */", "fn f<'a>(x: &'a str) -> char {\n'\\''\n}"),
    ("rust", 'let s = r#"// " not"#; // c', 'let s = r#"// " not"#;'),
    ("c", "#define A 1 /* one */\nint x = 'a'; // c", "#define A 1\nint\nx='a';"),
    ("cpp", 'auto s = R"x(// )" )x"; int n = 1\'000;', 'auto s = R"x(// )" )x"; // c\nint n = 1\'000;'),
    ("bash", "# c\nls   -l\n\n", "ls -l\n"),
    # quotes, parentheses, suites, numbers and strings that a formatter or `ast.unparse` writes otherwise
    ("python", "x = 'a' \"b\" + u'\\x41\\n'\n", 'x = """ab""" + "A\\n"\n'),
    ("python", "x = r'\\d' + f'{a [0]:>3}{{' 'c'\n", 'x = "\\\\d" + f"{a[0]:>3}{{c"\n'),
    ("python", "x = f'{a=}'\n", "x = f'a={a!r}'\n"),
    ("python", "if (a and b): return (x, y)\n", "if a and b:\n    return x, y\n"),
    ("python", "x = (a * b) + (-c) ** (-d)\n", "x = a * b + (-c) ** -d\n"),
    ("python", "f((a for a, b in c),)\n", "f(a for (a, b) in c)\n"),
    ("python", "class A(): pass\nfor (a, b) in (c, d): e; f\n", "class A:\n  pass\nfor a, b in c, d:\n  e\n  f\n"),
    ("python", "if a:\n  b\nelse:\n  if c:\n    d\n  else:\n    e\nf\n", "if a: b\nelif c: d\nelse: e\nf\n"),
    ("python", "from a import (b,)\nreturn a, b,\n", "from a import b\nreturn (a, b)\n"),
    ("python", "x = 0xFF + 1_0 + 1e-5 + .5 + 100000.0 + 1.\n", "x = 255 + 10 + 1E-05 + 0.5 + 1e5 + 1.0\n"),
    ("python", "x = 0xFFFFFFFFFFFFFFFFFFFF\n", "x = 1208925819614629174706175\n"),
    ("python", 'def f():\n  """One.\n\n     Two.\n  """\n', "def f():\n    'One. Two.'\n"),
    ("python", "x = lambda a, b: ((a if b else c))\n", "x = (lambda a, b: a if b else c)\n"),
    ("javascript", "let a = 'it\\'s'; f((x) => (x + 1))", 'let a = "it\'s"\nf(x => x + 1,)'),
    ("javascript", "return (a === b) || ((c && d));", "return a === b || c && d"),
    ("java", "return ((int) x + (y)); a = (List.<A, B>of());", "return (int) x + y; a = List.<A, B>of();"),
    ("go", "if (a == b) && (c&d) != 0 { return }", "if a == b && c&d != 0 { return }"),
    ("rust", "let x = (a & b) == (c);", "let x = a & b == c;"),
    ("c", 'x = "a" /* c */ "b"; y = (a * b) + (*p).z;', 'x = "ab";\ny = a * b + (*p).z;'),
    ("python", "x = a[b::] + c[::] + d[e, f::]\n", "x = a[b:] + c[:] + d[e, f:]\n"),
    ("python", "x = f'{max(a, b,)}'\n", "x = f'{max(a, b)}'\n"),
    ("typescript", "const a = f<number>((b), c,)", "const a = f<number>(b, c)"),
    ("typescript", "const a = (f<A, B<C>>({ b }))\n~c", "const a = f<A, B<C>>({ b },)\n~c"),
    ("javascript", "if ((a?.b) === (c ?? d)) e", "if (a?.b === (c ?? d)) e"),
    ("javascript", "a = `b ${ c && d } e`", "a = `b ${c&&d} e`"),
    ("typescript", "f<{ a?: B; c: D }>([(e)!], 1,)", "f<{ a?: B; c: D }>([e!], 1)"),
    ("typescript", "a['b']<C>(d,)", 'a["b"]<C>((d))'),
    ("go", "f((match),)\nreturn", "f(match)\nreturn"),
    ("go", "if a < (0) { return b }\nif c > (d) { return }", "if a < 0 { return b }\nif c > d { return }"),
    ("rust", "let Some(a) = (b) else { return (!c()?) };", "let Some(a) = b else { return !c()? };"),
    ("rust", "f::<&(dyn A + 'static)>((a),)", "f::<&(dyn A + 'static)>(a)"),
    ("java", "assert (a) >= (0) && b;", "assert a >= 0 && b;"),
    ("rust", "let a = f::<(), B>((c),);", "let a = f::<(), B>(c);"),
    (
        "rust",
        "match a { b if ((c) > 0) => ((d == e) && match f { _ => g }), }",
        "match a { b if c > 0 => d == e && match f { _ => g } }",
    ),
    ("java", "a = new B<C>((d)); if ((e < f) && (g > (h))) {}", "a = new B<C>(d); if (e < f && g > h) {}"),
    ("cpp", "x = 0XFF; return (a && b) || c;", "x = 0xff; return a && b || c;"),
]
DIFFERENT = [
    ("python", "if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n"),  # indentation is meaning
    ("python", "x = (1,)\n", "x = (1)\n"),
    ("python", "x = '# a'\n", "x = '# b'\n"),
    ("javascript", "x = [1,,]", "x = [1,]"),
    ("javascript", "a = '// x'", "a = '// y'"),
    ("c", "#define A\nB", "#define A B"),
    ("c", "F(a,)", "F(a)"),  # a macro's arguments
    ("rust", "let t = (a,);", "let t = (a);"),
    ("go", "x := `a  b`", "x := `a b`"),
    ("java", "a++ + b", "a + ++b"),
    ("python", "x = (a + b) * c\n", "x = a + b * c\n"),
    ("python", "x = a - (b - c)\n", "x = a - b - c\n"),
    ("python", "x = (a < b) < c\n", "x = a < b < c\n"),
    ("python", "f((a, b))\n", "f(a, b)\n"),
    ("python", "x = [(a for a in b)]\n", "x = [a for a in b]\n"),
    ("python", "x = (a, b), c\n", "x = a, b, c\n"),
    ("python", "x = 'a'\n", "x = b'a'\n"),
    ("python", "x = 'a'\n", "x = a\n"),
    ("python", "x = f'{a}'\n", "x = '{a}'\n"),
    ("python", "x = 'a b'\n", "x = 'a  b'\n"),  # not a docstring
    ("python", "x = (lambda: a)()\n", "x = lambda: a()\n"),
    ("python", "if a:\n  b\nelif c:\n  d\ne\n", "if a:\n  b\nelse:\n  if c:\n    d\n  e\n"),
    ("python", "x = not (a) in b\n", "x = not (a in c)\n"),
    ("python", "x = 1e5\n", "x = 100000\n"),
    ("python", "x = a[::b]\n", "x = a[:b]\n"),
    ("python", "x = f'{(a,)}'\n", "x = f'{(a)}'\n"),
    ("javascript", "f('a')", "f(a)"),
    ("javascript", "x = (a?.b).c", "x = a?.b.c"),
    ("javascript", "x = `a ${ b } c`", "x = `a ${b} d`"),
    ("javascript", "x = `a  b`", "x = `a b`"),
    ("typescript", "x = f<a>((b, c))", "x = f<a>(b, c)"),
    ("javascript", "x = (a, b)", "x = a, b"),
    ("javascript", "x = (a || b) && c", "x = a || b && c"),
    ("c", "x = (a & b) == c;", "x = a & b == c;"),
    ("c", "x = (a + b) * c;", "x = a + b * c;"),
    ("c", "x = -(a + b);", "x = -a + b;"),
    ("go", "x := (a + b) << 2", "x := a + b << 2"),
    ("rust", "let x = (a | b) & c;", "let x = a | b & c;"),
    ("java", "x = a / (b * c);", "x = a / b * c;"),
]


@pytest.mark.parametrize(("language", "text", "other"), SAME)
def test_formatting_does_not_change_the_digest(language: str, text: str, other: str) -> None:
    assert tokens_of(text, language).stream == tokens_of(other, language).stream
    assert text_features(text, language).digest == text_features(other, language).digest


@pytest.mark.parametrize(("language", "text", "other"), DIFFERENT)
def test_changes_of_meaning_change_the_digest(language: str, text: str, other: str) -> None:
    assert text_features(text, language).digest != text_features(other, language).digest


def test_digest_depends_on_the_language() -> None:
    assert text_features("x", "c").digest != text_features("x", "cpp").digest


HOSTILE = st.text(st.sampled_from(list("\"'`\\/*{}()[]#$r\n\t ,;<>=a1_\0é€𝄞")), max_size=200)


@given(HOSTILE, st.sampled_from(sorted(LANGUAGES)))
def test_any_text_has_deterministic_features(text: str, language: str) -> None:
    first = text_features(text, language)
    assert text_features(text, language) == first
    assert all(0 <= share <= 1 for share in (first.comment_share, first.string_share, first.number_share))
    tokens = tokens_of(text, language)
    assert len(tokens.stream) <= 4 * len(text.encode()) + 64
    assert list(tokens.starts) == sorted(tokens.starts)


@pytest.mark.parametrize(
    "piece",
    ["(", "[{", "\"'", "`${", "/*", 'r#"', "'''", "a<", "\n    ", "#define \\\n", "/* ", 'r##"#', "x='", 'R"a('],
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    text = piece * (300_000 // len(piece))
    for language in ("python", "javascript", "rust", "cpp", "go", "bash"):
        assert len(text_features(text, language).digest) == 16


def test_shares_of_comments_strings_and_numbers() -> None:
    assert text_features("# only words here\n" * 9 + "x\n", "python").comment_share > 0.9
    assert text_features("x = '" + "a" * 900 + "'\n", "python").string_share > 0.9
    assert text_features("1234567 " * 100, "c").number_share == 1


def batch_of(texts: list[str], language: str = "python", reason: str = "") -> pa.RecordBatch:
    columns = {
        "id": [f"{i}" for i in range(len(texts))],
        "language": [language] * len(texts),
        "text": texts,
        "reason": [reason] * len(texts),
    }
    return complete(pa.record_batch(columns))


def test_features_of_a_batch_equal_those_of_single_texts_also_in_a_slice() -> None:
    texts = [f"def f{i}(a, b):\n    return a * {i} + b\n" * 5 for i in range(6)]
    batch = batch_of(texts)
    whole = FEATURES(batch).to_pylist()
    parts = [row for part in map(FEATURES, [batch.slice(0, 2), batch.slice(2)]) for row in part.to_pylist()]
    assert parts == whole
    for text, row in zip(texts, whole, strict=True):
        known = text_features(text, "python")
        assert (row["digest"], row["bands"], row["sketch"]) == (known.digest, known.bands, known.sketch)
        assert row["text"] == text  # as it was written


def test_dropped_document_gets_no_features() -> None:
    row = FEATURES(batch_of([""], reason="empty")).to_pylist()[0]
    assert (row["digest"], row["bands"], row["sketch"]) == (b"", b"", b"")
    assert set(row) == set(STREAM.names)
