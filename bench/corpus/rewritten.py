"""Programs rewritten from tree-sitter's tree: the same program, or another one. Ground truth for exact deduplication.

It does not use lakh's lexer. `same_program` changes comments, blanks, line breaks, indentation, quotes, parentheses and
trailing commas; the result counts only if tree-sitter reads the same tree from it (without comments, parentheses and
commas, and with the quotes of plain strings removed). `other_program` changes one token, the blanks in a string or the
grouping of two operators; the result counts only if the tree differs.

Grammars: those of lakh, and `pip install 'tree-sitter-language-pack<1' tree-sitter-haskell` for the others.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from functools import lru_cache
from typing import Any

from bench.corpus.scala_infix import Infix, holds_placeholder, infix_tree, operands_of
from lakh.corpus.filters.syntax import parser_of

LINE_COMMENT = {
    **dict.fromkeys(["bash", "cmake", "elixir", "julia", "perl", "powershell", "python", "r", "ruby"], b"# note"),
    **dict.fromkeys(["erlang", "matlab"], b"% note"),
    **dict.fromkeys(["lua", "haskell", "sql"], b"-- note"),
    "clojure": b"; note",
    "fortran": b"! note",
    **dict.fromkeys(["ocaml"], b"(* note *)"),
    "css": b"/* note */",
}  # the others: // note
FREE = {
    "c", "clojure", "cpp", "cuda", "css", "csharp", "dart", "erlang", "java", "lua", "ocaml", "perl", "php", "rust",
    "solidity", "sql", "zig",
}  # fmt: skip
"""A line end is a blank."""
FREE_IN_BRACKETS = {"cmake": "(", "groovy": "([", "julia": "(", "python": "([{", "r": "(["}
NO_PRECEDENCE = {"haskell", "matlab", "solidity"}
"""Their grammars do not know the precedence of all operators: parentheses go around single tokens only.
Scala's grammar does not either, but scala_infix.py does."""
OFFSIDE = {"fsharp", "haskell", "python"}
QUOTES = {
    "bash": "$`\\!", "css": "\\", "dart": "\\$", "fortran": "\\", "groovy": "\\$", "javascript": "\\", "lua": "\\",
    "perl": "\\$@", "php": "\\$", "powershell": "$`", "python": "\\", "r": "\\", "ruby": "\\#", "typescript": "\\",
}  # fmt: skip
"""Where both quotes make a string, unless one of these characters is in it."""
GROUPS = {
    "c", "cpp", "cuda", "csharp", "dart", "elixir", "erlang", "fortran", "go", "groovy", "haskell", "java",
    "javascript", "julia", "kotlin", "lua", "matlab", "ocaml", "perl", "php", "powershell", "python", "ruby",
    "rust", "scala",
    "solidity", "sql", "swift", "typescript", "verilog", "zig",
}  # fmt: skip
CALLS_WITHOUT_PARENTHESES = {
    "elixir",
    "fsharp",
    "groovy",
    "haskell",
    "julia",
    "matlab",
    "ocaml",
    "perl",
    "powershell",
    "ruby",
}
"""There a parenthesis after a name may be that of a call."""
TRAILING = {
    "elixir": "]}", "go": ")", "groovy": "]", "javascript": "])}", "julia": "])", "kotlin": ")]", "lua": "}",
    "perl": ")]",
    "php": "])", "python": "])}", "ruby": "])}", "rust": ")]", "typescript": "])}", "zig": "})", "dart": "])",
}  # fmt: skip
ATOMIC_PARTS = (
    "string", "heredoc", "regex", "char", "quoted", "literal_content", "pod", "sigil", "symbol_array", "data_section",
    "preproc", "directive", "backtick", "template", "jsx", "word_array", "quasi", "here_", "macro", "pragma", "asm_",
    "attribute_item", "expansion", "raw_text", "plain_value", "transpose", "text_interpolation", "inline_html",
    "uninterpreted", "bracket_argument", "nowdoc",
    "selectors", "postfix", "subshell", "matrix", "cell", "newline", "empty_expression", "call_command",
)  # fmt: skip
NOT_ATOMIC = {"template_body", "template_declaration"}
"""The body of a class in Scala, and templates of C++."""
OPERAND_PARTS = ("identifier", "number", "integer", "float", "variable", "call", "binary", "name", "literal", "infix")
BINARY_PARTS = (
    "binary", "infix", "comparison", "arith", "boolean", "logical", "op_exp", "additive_exp", "multiplicative_exp",
    "conjunction_exp", "disjunction_exp", "equality_exp", "relational_exp", "bitwise_", "shift_exp", "nil_coalescing",
    "if_null_exp",
)  # fmt: skip
COMPARISONS = {
    b"<", b"<=", b">", b">=", b"==", b"!=", b"===", b"!==", b"<:", b">:", b"in", b"isa",
    *(character.encode() for character in "≤≥≠≡≢≈≉∈∉∋∌⊆⊈⊇⊂⊃"),
}  # fmt: skip
IGNORED = ("parenthes", "paren_exp", "paren_", "parens", "group")
TUPLES = {"scala": "tuple_pattern", "swift": "tuple_expression"}
"""There a grammar reads (a) as a tuple with one part, which the language does not have."""


@lru_cache(maxsize=64)
def parser_for(language: str) -> Any:
    """lakh's parser, that of a package tree-sitter-LANGUAGE or of the language pack; None without all of them."""
    known = parser_of(language)
    if known is not None:
        return known
    with contextlib.suppress(ImportError, AttributeError):
        import tree_sitter

        module = importlib.import_module(f"tree_sitter_{language}")
        return tree_sitter.Parser(tree_sitter.Language(module.language()))
    with contextlib.suppress(ImportError, LookupError):
        pack = importlib.import_module("tree_sitter_language_pack")
        return pack.get_parser({"protobuf": "proto"}.get(language, language))
    return None


def _is_comment(node: Any) -> bool:
    return "comment" in node.type.lower() or node.type in ("pod", "haddock")


def _is_atomic(node: Any) -> bool:
    return node.type not in NOT_ATOMIC and any(part in node.type.lower() for part in ATOMIC_PARTS)


def _shape(root: Any, data: bytes, language: str) -> list[Any]:
    """The tree in prefix order, without what formatters may change."""
    found: list[Any] = []
    queue: list[Any] = [root]
    while queue:
        node = queue.pop()
        if isinstance(node, str):
            found.append(node)
            continue
        if language == "scala" and not isinstance(node, Infix):
            node = infix_tree(node, data) or node
        if isinstance(node, Infix):
            found.append(node.type)
            queue += [")", node.right, node.operator, node.left]
            continue
        text = data[node.start_byte : node.end_byte]
        if _is_comment(node) or text in (b",", b"(", b")") or not text.strip():
            continue
        if node.is_named and "string" in node.type.lower() and text[:1] in b"\"'" and text[:1] == text[-1:]:
            inner = text[1:-1]
            if language in QUOTES and not any(byte in inner for byte in (QUOTES[language] + "\"'").encode()):
                found.append(inner)
                continue
        if not node.children:
            found.append((node.type if node.is_named else "", text))
        elif (
            any(part in node.type.lower() for part in IGNORED)
            or (text[:1] == b"(" and node.type == "block")
            or node.type == TUPLES.get(language)
            or (language == "solidity" and node.type == "expression")  # around every operand and group
        ) and len(node.named_children) == 1:
            queue += reversed(node.children)
        else:
            found.append(node.type)
            queue.append(")")
            queue += reversed(node.children)
    return found


def same_program(text: str, language: str, rng: random.Random, *, layout: bool) -> str | None:
    """The same program in another layout, or with other quotes, parentheses and commas; None if none is sure."""
    data = text.replace("\r\n", "\n").encode()
    parser = parser_for(language)
    tree = parser.parse(data) if parser else None
    if tree is None or tree.root_node.has_error:
        return None
    other = _other_layout(tree, data, language, rng) if layout else _other_tokens(tree, data, language, rng)
    if other == data:
        return None
    new = parser.parse(other)
    if new.root_node.has_error or _shape(new.root_node, other, language) != _shape(tree.root_node, data, language):
        return None
    return other.decode()


def _leaves(root: Any) -> list[Any]:
    found: list[Any] = []
    queue = [root]
    while queue:
        node = queue.pop()
        if node.start_byte == node.end_byte:
            continue
        if _is_comment(node) or _is_atomic(node) or not node.children:
            found.append(node)
        else:
            queue += reversed(node.children)
    return found


def _other_layout(tree: Any, data: bytes, language: str, rng: random.Random) -> bytes:
    note = LINE_COMMENT.get(language, b"// note")
    out: list[bytes] = []
    brackets: list[str] = []
    at = 0
    last, last_type = b"", ""
    for node in _leaves(tree.root_node):
        if node.start_byte < at:
            continue
        gap, token = data[at : node.start_byte], data[node.start_byte : node.end_byte]
        if _is_comment(node) and not token.startswith(b"#!"):
            out.append(gap if b"\n" in gap or not gap else b" ")
            out.append(b"\n" if token.endswith(b"\n") else b" " if not gap else b"")
            at = node.end_byte
            continue
        after_heredoc = b"\n" in gap and b"<<" in data[data.rfind(b"\n", 0, max(at, 0)) + 1 : at]
        # a comment after the last line of a here-document or after a line string of Zig would be a part of it
        ends_literal = "heredoc" in last_type or (language == "zig" and last.startswith(b"\\\\"))
        out.append(gap if after_heredoc or ends_literal else _gap(gap, brackets, language, rng, note))
        last, last_type = token, node.type
        if token in (b"(", b"[", b"{"):
            brackets.append(token.decode())
        elif token in (b")", b"]", b"}") and brackets:
            brackets.pop()
        out.append(token)
        at = node.end_byte
    return b"".join([*out, data[at:]])


def _gap(gap: bytes, brackets: list[str], language: str, rng: random.Random, note: bytes) -> bytes:
    if not gap or gap.strip(b" \t\n"):
        return gap
    is_free = language in FREE or (bool(brackets) and brackets[-1] in FREE_IN_BRACKETS.get(language, ""))
    if b"\n" in gap:
        indent = gap.rpartition(b"\n")[2]
        tail = b" " + note if rng.random() < 0.15 and language not in ("html", "markdown", "cmake") else b""
        if language in OFFSIDE:
            indent = b" " * (2 * len(indent.expandtabs(8)))
        else:
            indent += rng.choice([b"", b" ", b"\t"])
        return tail + b"\n" * rng.choice([gap.count(b"\n"), 1, 2]) + indent
    if is_free and rng.random() < 0.1:
        return b"\n  "
    return b" " * rng.choice([1, 1, 2, 3]) if gap.strip(b" ") == b"" else gap


def _binary_parts(node: Any) -> tuple[Any, Any] | None:
    """The operands of a node that is an operator between two operands."""
    if not any(part in node.type.lower() for part in BINARY_PARTS):
        return None
    named = [child for child in node.children if not _is_comment(child)]
    if len(named) != 3 or named[1].type in ("=", "<-", "->"):
        return None
    return named[0], named[2]


def _operator(node: Any, data: bytes) -> bytes:
    """The operator of a node with two operands."""
    parts = [child for child in node.children if not _is_comment(child)]
    return data[parts[1].start_byte : parts[1].end_byte] if len(parts) == 3 else b""


def _regroups(node: Any, child: Any, data: bytes, language: str) -> bool:
    """Whether parentheses around the operand `child` make another program, which the grammar does not show.

    Julia's && and || associate to the right (in its grammar to the left), and its comparisons form chains. Perl repeats
    a list in (a) x 3, and its grammar reads 0..9 as two numbers. (a) + b may be a cast in C#. The grammars of
    Dart and Swift read A<B>(c) as two comparisons.
    """
    operator = _operator(node, data)
    is_left = child.start_byte == node.start_byte
    if language == "julia":
        inner = _operator(child, data)
        return (is_left and operator in (b"&&", b"||") and inner == operator) or (
            operator.lstrip(b".") in COMPARISONS and inner.lstrip(b".") in COMPARISONS
        )
    if language == "csharp":
        return (
            is_left
            and operator in (b"+", b"-", b"*", b"&")
            and child.type in ("identifier", "member_access_expression")
        )
    if language in ("dart", "swift"):
        is_generic = operator == b"<" and data[node.end_byte :].lstrip()[:1] == b">"
        return is_generic or (operator == b">" and _operator(node.children[0], data) == b"<")
    if language == "perl":
        return (is_left and operator == b"x") or data[child.start_byte : child.end_byte].endswith(b".")
    return False


def _is_single(node: Any) -> bool:
    """Whether a node is one token; Solidity's grammar has a node around each operand."""
    while node.type == "expression" and len(node.children) == 1:
        node = node.children[0]
    return not node.children


def _operands(node: Any, data: bytes, language: str) -> list[Any]:
    """The operands of an operator around which parentheses change nothing."""
    if language != "scala":
        return list(_binary_parts(node) or ()) if language in GROUPS else []
    if node.type not in ("infix_expression", "infix_pattern") or (node.parent and node.parent.type == node.type):
        return []  # parentheses in a type are another node of the grammar
    tree = infix_tree(node, data)
    operands = operands_of(tree) if tree else ()
    return [one for one in operands if not holds_placeholder(node, one.start_byte, one.end_byte)]


def _other_tokens(tree: Any, data: bytes, language: str, rng: random.Random) -> bytes:
    edits: list[tuple[int, int, bytes]] = []
    queue = [tree.root_node]
    while queue:
        node = queue.pop()
        text = data[node.start_byte : node.end_byte]
        if node.is_named and "string" in node.type.lower() and text[:1] in (b'"', b"'") and text[-1:] == text[:1]:
            inner = text[1:-1]
            if language in QUOTES and inner and not any(b in inner for b in (QUOTES[language] + "\"'\n").encode()):
                quote = b"'" if text[:1] == b'"' else b'"'
                edits += [(node.start_byte, node.start_byte + 1, quote), (node.end_byte - 1, node.end_byte, quote)]
            continue
        if _is_comment(node) or _is_atomic(node):
            continue
        queue += node.children
        for child in _operands(node, data, language):
            operand = data[child.start_byte : child.end_byte]
            if isinstance(child, Infix):
                pass
            elif (language in NO_PRECEDENCE and not _is_single(child)) or _regroups(node, child, data, language):
                continue
            is_plain = isinstance(child, Infix) or (
                child.is_named
                and (child.type == "expression" or any(part in child.type.lower() for part in OPERAND_PARTS))
            )
            before = data[: child.start_byte].rstrip(b" \t")[-1:]
            if language in CALLS_WITHOUT_PARENTHESES and (before.isalnum() or before in b"_?!"):
                continue
            if is_plain and b"\n" not in operand and operand[:1] not in b"([{" and rng.random() < 0.3:
                edits += [(child.start_byte, child.start_byte, b"("), (child.end_byte, child.end_byte, b")")]
        if language in TRAILING and len(node.children) > 3 and rng.random() < 0.5:
            last, close = node.children[-2], node.children[-1]
            closing = data[close.start_byte : close.end_byte].decode(errors="replace")
            if closing in TRAILING[language].split() or (len(closing) == 1 and closing in TRAILING[language]):
                commas = sum(child.type == "," for child in node.children)
                if last.type == "," and (commas > 1 or closing != ")"):  # (x,) may be a tuple
                    edits.append((last.start_byte, last.end_byte, b""))
                elif last.type != "," and commas and last.is_named and data[last.end_byte : close.start_byte] == b"":
                    edits.append((last.end_byte, last.end_byte, b","))
    order = {b")": 0, b",": 1, b"(": 2}
    out, at = [], 0
    for begin, end, new in sorted(edits, key=lambda edit: (edit[0], order.get(edit[2], 3), edit[1])):
        if begin < at:
            continue
        out += [data[at:begin], new]
        at = end
    return b"".join([*out, data[at:]])


def other_program(text: str, language: str, rng: random.Random) -> str | None:
    """Another program that differs little: one token, the blanks in a string, or how two operators group."""
    data = text.replace("\r\n", "\n").encode()
    parser = parser_for(language)
    tree = parser.parse(data) if parser else None
    if tree is None or tree.root_node.has_error:
        return None
    edits: list[list[tuple[int, int, bytes]]] = []
    queue = [tree.root_node]
    while queue:
        node = queue.pop()
        if _is_comment(node):
            continue
        queue += node.children
        text_of = data[node.start_byte : node.end_byte]
        if not node.children and node.is_named and text_of[-1:].isalnum():
            edits.append([(node.end_byte, node.end_byte, b"1")])
        elif not node.children and text_of in (b"+", b"-", b"*", b"<", b">", b"==", b"&&"):
            other = {b"+": b"-", b"-": b"+", b"*": b"+", b"<": b">", b">": b"<", b"==": b"!=", b"&&": b"||"}[text_of]
            edits.append([(node.start_byte, node.end_byte, other)])
        elif "string" in node.type.lower() and text_of[:1] in b"\"'" and b" " in text_of[1:-1]:
            if language == "python" and node.parent is not None and node.parent.type == "expression_statement":
                continue  # a docstring, whose layout is no part of the program
            place = node.start_byte + text_of.index(b" ")
            edits.append([(place, place, b" ")])
        parts = _binary_parts(node) if language in GROUPS else None
        inner = _binary_parts(parts[0]) if parts else None
        # Julia's && and || associate to the right, which its grammar does not show
        is_same = language == "julia" and parts and _operator(parts[0], data) == _operator(node, data) in (b"&&", b"||")
        if parts and inner and not is_same:  # a * b + c becomes a * (b + c)
            first, last = inner[1].start_byte, parts[1].end_byte
            edits += [[(first, first, b"("), (last, last, b")")]] * 3
    if not edits:
        return None
    chosen = sorted(rng.choice(edits), reverse=True)
    other = data
    for begin, end, new in chosen:
        other = other[:begin] + new + other[end:]
    new_tree = parser.parse(other)
    if new_tree.root_node.has_error:
        return None
    if _shape(new_tree.root_node, other, language) == _shape(tree.root_node, data, language):
        return None
    return other.decode(errors="replace")
