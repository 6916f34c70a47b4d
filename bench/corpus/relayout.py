"""The same code in another layout, made from tree-sitter's tree: ground truth for exact deduplication.

It does not use lakh's lexer, so that the lexer's mistakes show: comments are removed, moved and rewritten where
tree-sitter finds comments, and blanks change only where the language ignores them. `respelt` puts redundant parentheses
around operands, arguments and values, removes others, changes quotes and adds or removes trailing commas.
"""

from __future__ import annotations

import ast
import random
from typing import Any

from lakh.corpus.filters.syntax import parser_of

# Parsed as one token, whatever is inside.
ATOMIC = {
    "string", "string_literal", "raw_string_literal", "char_literal", "character_literal", "interpreted_string_literal",
    "template_string", "regex", "rune_literal", "lifetime", "label", "jsx_text", "jsx_element", "jsx_self_closing_element",  # noqa: E501
    "preproc_include", "preproc_def", "preproc_function_def", "preproc_call", "preproc_if", "preproc_ifdef", "preproc_else",  # noqa: E501
    "preproc_elif", "preproc_directive", "text_block", "concatenated_string", "system_lib_string", "loop_label", "escape_sequence",  # noqa: E501
    "hash_bang_line", "html_comment", "shebang",
}  # fmt: skip
COMMENTS = {"comment", "line_comment", "block_comment", "doc_comment"}
OPEN, CLOSE = {"(", "[", "{"}, {")", "]", "}"}
FREE = {"c", "cpp", "java", "rust"}  # a line end means nothing outside preprocessor lines


def relayout(text: str, language: str, rng: random.Random) -> str | None:
    """The text in another layout; None if tree-sitter cannot parse it."""
    data = text.replace("\r\n", "\n").encode()
    tree = parser_of(language).parse(data)
    if tree.root_node.has_error:
        return None
    leaves: list[Any] = []
    _leaves(tree.root_node, leaves)
    out: list[bytes] = []
    at, depth = 0, 0
    note = b"# note %d" if language == "python" else b"// note %d"
    for place, (begin, end, is_comment, is_atomic) in enumerate(leaves):
        gap = data[at:begin]
        if is_comment:
            # a comment is replaced by its line end or a blank
            out.append(_gap(gap, depth, language, rng, b""))
            if place == 0 and data[begin : begin + 2] == b"#!":
                out.append(data[begin:end])
            elif data[begin:end].endswith(b"\n"):
                out.append(b"\n")
            elif out[-1][-1:] not in (b" ", b"\n"):
                out.append(b" ")
            at = end
            continue
        token = data[begin:end]
        if gap or (place and rng.random() < 0.15 and _may_part(data, at, token, language, is_atomic)):
            out.append(_gap(gap or b" ", depth, language, rng, note % rng.randrange(99)))
        if token in (b"(", b"[", b"{") or (language == "python" and token in (b"${",)):
            depth += 1
        elif token in (b")", b"]", b"}"):
            depth = max(0, depth - 1)
        out.append(token)
        at = end
    out.append(b"\n" * rng.randint(1, 3))
    other = b"".join(out).decode()
    # A form feed resets Python's column, which the new blanks ignore: skip what Python no longer accepts.
    return None if language == "python" and _compiles(text) and not _compiles(other) else other


# What may stand in further parentheses, by its parent and its place there.
WRAPPED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["binary_expression", "binary_operator", "boolean_operator"], ("left", "right")),
    **dict.fromkeys(["assignment_expression", "assignment"], ("right",)),
    **dict.fromkeys(["variable_declarator", "init_declarator", "let_declaration"], ("value",)),
    **dict.fromkeys(["return_statement", "argument_list", "arguments"], ()),
}
# Kinds of node that are complete expressions in every grammar.
PLAIN = {
    "attribute",
    "binary_expression",
    "binary_operator",
    "boolean_operator",
    "call",
    "call_expression",
    "conditional_expression",
    "decimal_integer_literal",
    "field_access",
    "field_expression",
    "float",
    "identifier",
    "index_expression",
    "int_literal",
    "integer",
    "integer_literal",
    "interpreted_string_literal",
    "member_expression",
    "method_invocation",
    "number",
    "number_literal",
    "selector_expression",
    "string",
    "string_literal",
    "subscript_expression",
    "ternary_expression",
    "unary_expression",
}
KEPT = {"macro_invocation", "jsx_element", "decorator", "template_string"}  # formatters keep what is inside
COMMA_LISTS = {
    "python": {"argument_list", "list", "dictionary", "parameters"},
    "go": {"argument_list"},
    "rust": {"arguments", "array_expression"},
    "javascript": {"arguments", "array", "object"},
    "typescript": {"arguments", "array", "object"},
}


def respelt(text: str, language: str, rng: random.Random) -> str | None:
    """The same syntax tree with other quotes, parentheses and trailing commas; None if tree-sitter cannot parse it."""
    data = text.replace("\r\n", "\n").encode()
    tree = parser_of(language).parse(data)
    if tree.root_node.has_error:
        return None
    edits: list[tuple[int, int, bytes]] = []
    queue = [tree.root_node]
    while queue:
        node = queue.pop()
        if node.type.startswith("preproc") or node.type in KEPT:
            continue
        queue += node.children
        places = WRAPPED.get(node.type)
        if places is not None:
            children = [node.child_by_field_name(place) for place in places] if places else node.named_children
            if language == "go" and node.type == "return_statement":
                children = []
            for child in children:
                if child is None or child.type not in PLAIN or _begins_statement(child):
                    continue
                if rng.random() < 0.3:
                    edits += [(child.start_byte, child.start_byte, b"("), (child.end_byte, child.end_byte, b")")]
        if node.type == "string" and language in ("python", "javascript", "typescript"):
            edits += _other_quotes(data, node.start_byte, node.end_byte)
        if node.type in COMMA_LISTS.get(language, ()) and len(node.children) > 2 and rng.random() < 0.3:
            last, close = node.children[-2], node.children[-1]
            if last.type == ",":
                edits.append((last.start_byte, last.end_byte, b""))
            elif last.is_named and last.type not in COMMENTS | {"generator_expression"}:
                element, gap = data[last.start_byte : last.end_byte], data[last.end_byte : close.start_byte]
                if b"..." not in element and b"\n" not in gap:
                    edits.append((last.end_byte, last.end_byte, b","))
    # At one position, closing parentheses come before commas, both before opening ones.
    order = {b")": 0, b",": 1, b"(": 2}
    out, at = [], 0
    for begin, end, new in sorted(edits, key=lambda edit: (edit[0], order.get(edit[2], 3), edit[1])):
        if begin < at:
            continue
        out += [data[at:begin], new]
        at = end
    other = b"".join([*out, data[at:]])
    if parser_of(language).parse(other).root_node.has_error:
        return None
    return None if language == "python" and not _same_tree(text, other.decode()) else other.decode()


def _begins_statement(node: Any) -> bool:
    """A parenthesis there would continue the line before it, in JavaScript without semicolons."""
    while node.parent is not None and node.parent.start_byte == node.start_byte:
        node = node.parent
        if node.type == "expression_statement":
            return True
    return False


def _other_quotes(data: bytes, begin: int, end: int) -> list[tuple[int, int, bytes]]:
    quote, literal = data[end - 1 : end], data[begin:end]
    other = b"'" if quote == b'"' else b'"'
    if literal[:1] != quote or other in literal or b"\\" in literal or len(literal) < 3 or literal[1:2] == quote:
        return []
    return [(begin, begin + 1, other), (end - 1, end, other)]


def _same_tree(text: str, other: str) -> bool:
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError):
        return False


def unparsed(text: str) -> str | None:
    """A Python program printed again from its syntax tree; None where Python itself does not read it back equally."""
    try:
        other = ast.unparse(ast.parse(text)) + "\n"
    except (SyntaxError, ValueError, RecursionError):
        return None
    return other if _same_tree(text, other) else None


def _compiles(text: str) -> bool:
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _leaves(root: Any, leaves: list[Any]) -> None:
    queue = [root]
    while queue:
        node = queue.pop()
        if node.start_byte == node.end_byte:
            continue
        atomic = node.type in ATOMIC
        if node.type in COMMENTS or atomic or not node.children:
            leaves.append((node.start_byte, node.end_byte, node.type in COMMENTS, atomic))
        else:
            queue += reversed(node.children)


def _may_part(data: bytes, at: int, token: bytes, language: str, atomic: bool) -> bool:
    """Only beside brackets, commas and semicolons: elsewhere a blank may split an operator."""
    before = data[at - 1 : at]
    if language == "python":
        return before in (b"(", b"[", b",") or token in (b")", b"]", b",")
    return before in (b"(", b"[", b",", b";", b"{") or (token in (b")", b"]", b";", b"}", b",") and not atomic)


def _gap(gap: bytes, depth: int, language: str, rng: random.Random, note: bytes) -> bytes:
    if not gap.strip() and language == "python":
        if depth:
            return rng.choice([b" ", b"\n", b"\n      ", b"  "]) if gap else b""
        if b"\n" in gap:
            indent = gap.rpartition(b"\n")[2]
            columns = len(indent.expandtabs(8)) * 2
            tail = b"  " + note if note and rng.random() < 0.2 else b" " * rng.randrange(2)
            return tail + b"\n" * rng.choice([1, 1, 2, 3]) + b" " * columns
        return b" " * rng.choice([1, 1, 2]) if gap else b""
    if gap.strip() or not gap:
        return gap  # a continuation line, or something that is not in the tree
    if b"\n" in gap:
        tail = b" " + note if note and rng.random() < 0.15 else b""
        return tail + b"\n" * rng.choice([1, 1, 2]) + b" \t"[: rng.randrange(3)] + gap.rpartition(b"\n")[2]
    if language in FREE and rng.random() < 0.1:
        return rng.choice([b"\n", b" /* x */ ", b"\t"])
    return b" " * rng.choice([1, 1, 2, 3])
