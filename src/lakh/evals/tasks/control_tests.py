"""Tests that an honest program fails, and shorter ones that it passes.

In other languages than Python, test and code under test are one process, and code can find and print whatever the test
would print at its end. Such a program passes any test. A program that passes its test is run again with changed tests,
which it has to fail, and with parts of its test, which it has to pass: a program that decides by chance, or by a
checksum of its test, would have to decide right each time (sandbox.py has the numbers).

A changed test must look like any other, or a program could tell it apart. Expected values in it are others; literals
whose change breaks any program (names of modules, sizes of arrays, exit codes) stay as they are.
"""

from __future__ import annotations

import ast
import math
import random
import re
import secrets

__all__ = ["changed_tests", "failing_unittests", "parts_of_test", "parts_of_unittest"]

MOST = 8  # changed tests
MOST_PARTS = 24
MOST_LINES = 6  # of one check
_LITERAL = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>(?<![\w.])\d+(?:\.\d+)?(?=[lLfFdDuU]{0,2}(?:\.to[A-Z]\w+)?(?![\w.])))"""
    r"""|(?P<truth>\b(?:true|false|True|False|TRUE|FALSE)\b)"""
)
_BRACKETS = "()[]<>"
_TRUTH = {"true": "false", "True": "False", "TRUE": "FALSE"}
_TRUTH |= {no: yes for yes, no in _TRUTH.items()}
_STRUCTURE = re.compile(
    r"\b(?:require|import|include|from(?!\()|package|use|throw|raise|die|panic|abort|quit|print)\b|\bnew\s+\w+\[$|\b(?:return|exit)\s*$"
)
_TOLERANCE = "0.001"  # the last number of a check in Racket
_EXPECTED_FIRST = re.compile(r"assert_equal\(\[*$")  # in Ruby; elsewhere it is the last literal of its line
# How a check begins, in the languages of the benchmarks.
_CHECK = re.compile(
    r"\s*(?:(?:\w+\.)?assert\w*!?\s*\(|assert\.\w+\(|assert_equal\b|\[\[|\{ actual:|if ?\(|Debug\.Assert\("
    r"|stopifnot\(|@test\(|\(check-within )"
)
_EQUALITIES = {"assertEqual", "assertEquals", "assertAlmostEqual", "assertCountEqual", "assertDictEqual",
               "assertListEqual", "assertMultiLineEqual", "assertSequenceEqual", "assertSetEqual",
               "assertTupleEqual"}  # fmt: skip
_MAY_NOT_RUN = (ast.If, ast.For, ast.While, ast.ExceptHandler)
# Of what a check may consist that can be left out. Indexing may add to a dict, and an iterator ends.
_VALUES = (ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Attribute, ast.UnaryOp, ast.BinOp,
           ast.BoolOp, ast.Compare, ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop,
           ast.cmpop)  # fmt: skip
_MAY_EXPECT = (ast.With, ast.Try)  # a test may expect that a check in them fails, by assertRaises or an except clause
_LOOKS = {"abs", "callable", "float", "hasattr", "int", "isinstance", "issubclass", "len", "round", "type"}
_OPPOSITES = {"assertTrue": "assertFalse", "assertFalse": "assertTrue"}


def changed_tests(test: str, generator: random.Random | None = None) -> list[str]:
    """At most MOST of them, in an order that a program cannot predict. Each has half or more of its expected values
    changed: some changes do not matter, such as one of an argument that looks like an expected value.
    """
    generator = generator or secrets.SystemRandom()
    found = [match for match in _LITERAL.finditer(test) if _is_data(match)]
    first = [match for match in found if _EXPECTED_FIRST.search(test[: match.start()])]
    of_line = {test.count("\n", 0, match.start()): match for match in (*found, *first)}.values()
    expected = [one for one in found if one in of_line or one["truth"]]
    changed: list[str] = []
    for _ in range(4 * MOST if expected else 0):
        size = generator.randint((len(expected) + 1) // 2, len(expected))
        text = test
        for number in sorted(generator.sample(range(len(expected)), size), reverse=True):
            one = expected[number]
            text = text[: one.start()] + _changed(one, generator) + text[one.end() :]
        if text not in changed:
            changed.append(text)
    return changed[:MOST]


def parts_of_test(test: str, generator: random.Random | None = None) -> list[str]:
    """The test without some of its checks, at most MOST_PARTS times; empty if it has fewer than two checks."""
    generator = generator or secrets.SystemRandom()
    lines = test.split("\n")
    checks = _checks(lines)

    def without(left_out: set[int]) -> str:
        dropped = {line for number in left_out for line in checks[number]}
        return "\n".join(line for number, line in enumerate(lines) if number not in dropped)

    return [without(left_out) for left_out in _subsets(len(checks), generator)]


def _checks(lines: list[str]) -> list[range]:
    """Lines of each check: from its first word to where all brackets are closed."""
    found, at = [], 0
    while at < len(lines):
        end, depth = at, 0
        while _CHECK.match(lines[at]) and end < min(at + MOST_LINES, len(lines)):
            plain = _LITERAL.sub("", lines[end])
            depth += sum(plain.count(one) for one in "([{") - sum(plain.count(one) for one in ")]}")
            end += 1
            if depth <= 0:
                break
        if end > at and depth == 0:
            found.append(range(at, end))
        at = max(end, at + 1)
    return found


def _subsets(count: int, generator: random.Random) -> list[set[int]]:
    """Different sets of some of the numbers below `count`, neither none nor all."""
    found: list[set[int]] = []
    for _ in range(4 * MOST_PARTS if count > 1 else 0):
        chosen = set(generator.sample(range(count), generator.randrange(1, count)))
        if chosen not in found:
            found.append(chosen)
    return found[:MOST_PARTS]


def failing_unittests(test: str, generator: random.Random | None = None) -> list[str]:
    """A unittest in Python with one check that cannot hold beside the original, at most MOST times.

    An expected value is another one, or a truth is the opposite. A test without such checks gets one at the end of a
    method that no program passes; a program could recognise that.
    """
    generator = generator or secrets.SystemRandom()
    numbers = list(range(len(_certain_checks(ast.parse(test)))))
    generator.shuffle(numbers)
    changed = []
    for number in numbers[:MOST]:
        tree = ast.parse(test)
        _falsify(_certain_checks(tree)[number], generator)
        changed.append(ast.unparse(tree))
    return changed or _with_failing_check(test, generator)


def parts_of_unittest(test: str, generator: random.Random | None = None) -> list[str]:
    """The unittest without its last test methods, or without some checks, or both, at most MOST_PARTS times.

    What is left runs as it does in the whole test: methods run in the order of their names and may depend on those
    before them, and a check is left out only if nothing else can depend on it.
    """
    generator = generator or secrets.SystemRandom()
    whole = ast.unparse(ast.parse(test))
    names = sorted({method.name for method in _methods(ast.parse(test))})  # the last of a name replaces the others
    parts: list[str] = []
    for _ in range(4 * MOST_PARTS if names else 0):
        tree = ast.parse(test)
        kept = names[: generator.randint(1, len(names))]
        methods = _methods(tree)
        left_out: list[ast.stmt] = [method for method in methods if method.name not in kept]
        checks = [one for method in methods if method.name in kept for one in _separate_checks(method)]
        left_out += generator.sample(checks, generator.randint(0, len(checks)))
        _leave_out(tree, left_out)
        text = ast.unparse(tree)
        if text not in (whole, *parts):
            parts.append(text)
    return parts[:MOST_PARTS]


def _separate_checks(method: ast.FunctionDef) -> list[ast.stmt]:
    """Checks that only look at values: without them, the rest of the test runs as before."""
    expected = {id(node) for block in ast.walk(method) if isinstance(block, _MAY_EXPECT) for node in ast.walk(block)}
    return [
        node
        for node in ast.walk(method)
        if id(node) not in expected
        and isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and re.fullmatch(r"assert(?!Raises|Warns|Logs|NoLogs)\w+", node.value.func.attr)
        and all(_only_looks(part) for argument in _arguments(node.value) for part in ast.walk(argument))
    ]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _only_looks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _LOOKS
    return isinstance(node, _VALUES)


def _leave_out(tree: ast.Module, left_out: list[ast.stmt]) -> None:
    dropped = set(map(id, left_out))
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and any(id(one) in dropped for one in block):
                setattr(node, name, [one for one in block if id(one) not in dropped] or [ast.Pass()])


def _certain_checks(node: ast.AST) -> list[ast.Call]:
    """Checks that every run reaches, and whose change makes them fail wherever they held."""
    if isinstance(node, ast.Call) and _is_certain(node):
        return [node]
    if isinstance(node, _MAY_NOT_RUN) or (isinstance(node, ast.With) and _expects_error(node)):
        return []
    # What precedes a check in `try` may raise, and its handlers may catch the failure of a check.
    inner = node.finalbody if isinstance(node, ast.Try) and node.handlers else ast.iter_child_nodes(node)
    return [check for child in inner for check in _certain_checks(child)]


def _is_certain(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in _OPPOSITES:
        return True
    return call.func.attr in _EQUALITIES and _expected(call) is not None and math.isfinite(_delta(call))


def _expects_error(block: ast.With) -> bool:
    return any("assertRaises" in ast.unparse(item) for item in block.items)


def _delta(call: ast.Call) -> float:
    """How far apart assertAlmostEqual lets two numbers be; infinite if that is not a constant."""
    for keyword in call.keywords:
        if keyword.arg == "delta":
            is_number = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, (int, float))
            return float(ast.literal_eval(keyword.value)) if is_number else math.inf
    return 0.0


def _expected(call: ast.Call) -> ast.Constant | None:
    """A constant in an argument that is all constants."""
    for argument in call.args[:2]:
        try:
            ast.literal_eval(argument)
        except (ValueError, TypeError, SyntaxError):
            continue
        constants = [one for one in ast.walk(argument) if isinstance(one, ast.Constant) and _can_change(one.value)]
        if constants:
            return constants[-1]
    return None


def _can_change(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, str) and re.search(r"\w", value) is not None)


def _falsify(node: ast.Call, generator: random.Random) -> None:
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr in _OPPOSITES:
        node.func.attr = _OPPOSITES[node.func.attr]
        return
    constant = _expected(node)
    assert constant is not None
    if isinstance(constant.value, bool):
        constant.value = not constant.value
    elif isinstance(constant.value, (int, float)):
        constant.value += generator.randrange(1, 10) + math.ceil(_delta(node))
    elif isinstance(constant.value, str):
        place = generator.choice([match.start() for match in re.finditer(r"\w", constant.value)])
        letter = _other(constant.value[place], "abcdefghij", generator)
        constant.value = constant.value[:place] + letter + constant.value[place + 1 :]


def _with_failing_check(test: str, generator: random.Random) -> list[str]:
    changed = []
    for number, found in enumerate(_methods(ast.parse(test))):
        if found.args.args and not isinstance(found.body[-1], (ast.Return, ast.Raise)):
            tree = ast.parse(test)
            method = _methods(tree)[number]
            first, second = generator.sample(range(1000), 2)
            method.body += ast.parse(f"{method.args.args[0].arg}.assertEqual({first}, {second})").body
            changed.append(ast.unparse(tree))
    generator.shuffle(changed)
    return changed[:MOST]


def _methods(tree: ast.Module) -> list[ast.FunctionDef]:
    return [
        method
        for kind in tree.body
        if isinstance(kind, ast.ClassDef) and kind.name == "TestCases"
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
    ]


def _is_data(literal: re.Match[str]) -> bool:
    if literal[0] == _TOLERANCE or (literal["text"] and not _places(literal["text"])):
        return False
    before = literal.string[literal.string.rfind("\n", 0, literal.start()) + 1 : literal.start()]
    return _STRUCTURE.search(_LITERAL.sub("", before)) is None


def _places(text: str) -> list[int]:
    """Where a character can be another one: letters and digits that are no escapes, else brackets."""
    places = [match.start() for match in re.finditer(r"\\(?:u\w{4}|x\w\w|.)|(\w)", text) if match[1]]
    return places or [match.start() for match in re.finditer(f"[{re.escape(_BRACKETS)}]", text)]


def _changed(literal: re.Match[str], generator: random.Random) -> str:
    if literal["truth"]:
        return _TRUTH[literal["truth"]]
    if literal["number"]:
        whole, dot, fraction = literal["number"].partition(".")
        return whole[:-1] + _other(whole[-1], "0123456789", generator) + dot + fraction
    text = literal["text"]
    place = generator.choice(_places(text))
    letters = _BRACKETS if text[place] in _BRACKETS else "abcdefghij"
    return text[:place] + _other(text[place], letters, generator) + text[place + 1 :]


def _other(letter: str, letters: str, generator: random.Random) -> str:
    return generator.choice([one for one in letters if one != letter])
