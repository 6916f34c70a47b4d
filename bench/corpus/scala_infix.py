"""Infix expressions of Scala grouped by precedence, which tree-sitter's grammar of Scala does not know.

The precedence and associativity are those of "Infix Operations" in the Scala Language Specification (6.12.3): the first
character of an operator decides, letters bind loosest, then | ^ & (= !) (< >) : (+ -) (* / %) and all other characters;
an operator that ends in a colon associates to the right; an assignment operator is looser than all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

INFIX_TYPES = ("infix_expression", "infix_pattern", "infix_type")
LEVELS = ("|", "^", "&", "=!", "<>", ":", "+-", "*/%")
BINDS_PLACEHOLDER = ("arguments", "block", "case_block", "interpolation", "parenthesized_expression", "type_arguments")


OPERATOR_BEFORE = re.compile(rb"([!#%&*+\-/:<=>?@\\^|~]+)\s*\Z")
MAX_BEFORE = 256


class Infix(NamedTuple):
    """An operator between two operands, which are of this class or nodes of tree-sitter."""

    type: str
    left: Any
    operator: Any
    right: Any

    @property
    def start_byte(self) -> int:
        return int(self.left.start_byte)

    @property
    def end_byte(self) -> int:
        return int(self.right.end_byte)


def infix_tree(node: Any, data: bytes) -> Infix | None:
    """The chain of infix operators at `node`, grouped by precedence; None if it is none or if it is ambiguous."""
    operands, operators = _chain(node)
    names = [data[one.start_byte : one.end_byte].decode() for one in operators]
    if not operators or "with" in names or any(map(_is_misread, operands)) or _is_misread(node.parent):
        return None
    before = OPERATOR_BEFORE.search(data, max(0, node.start_byte - MAX_BEFORE), node.start_byte)
    if before and before[1] not in (b"=", b"=>", b"<-", b":", b"|", b"@"):
        return None  # the grammar has taken an operator at a line end for the end of a statement
    grouped = _group(node.type, operands, operators, names)
    return grouped if isinstance(grouped, Infix) else None


def operands_of(tree: Infix) -> Iterator[Any]:
    """Every operand in the tree; parentheses around one change nothing."""
    for operand in (tree.left, tree.right):
        yield operand
        if isinstance(operand, Infix):
            yield from operands_of(operand)


def holds_placeholder(node: Any, begin: int, end: int) -> bool:
    """Whether parentheses around these bytes of `node` would make a function of them: (_ + 1)."""
    queue = [node]
    while queue:
        found = queue.pop()
        if found.end_byte <= begin or found.start_byte >= end:
            continue
        queue += found.children
        if found.type != "wildcard":
            continue
        if found.parent is not None and found.parent.type in ("arguments", "tuple_expression"):
            found = found.parent  # the placeholder of f(_) is bound outside the call
        found = found.parent
        while found is not None and begin <= found.start_byte and found.end_byte <= end:
            if found.type in BINDS_PLACEHOLDER:
                break
            found = found.parent
        else:
            return True
    return False


def _is_misread(node: Any) -> bool:
    """Whether the grammar has given the arguments of the last operand to the whole chain: (a == b)[C] for a == b[C]."""
    while node is not None and node.type in ("generic_function", "call_expression", "field_expression"):
        node = node.children[0]
    return node is not None and node.type in INFIX_TYPES


def _chain(node: Any) -> tuple[list[Any], list[Any]]:
    """The operands and operators of a chain, in their order in the text."""
    parts = [child for child in node.children if "comment" not in child.type]
    if node.type not in INFIX_TYPES or len(parts) != 3:
        return [node], []
    operands, operators = _chain(parts[0]) if parts[0].type == node.type else ([parts[0]], [])
    more, others = _chain(parts[2]) if parts[2].type == node.type else ([parts[2]], [])
    return operands + more, [*operators, parts[1], *others]


def _level(operator: str) -> int:
    if operator[-1] == "=" and operator[0] != "=" and operator not in ("<=", ">=", "!="):
        return -1
    if operator[0].isalpha() or operator[0] in "_$`":
        return 0
    return next((level for level, first in enumerate(LEVELS, 1) if operator[0] in first), len(LEVELS) + 1)


def _group(kind: str, operands: list[Any], operators: list[Any], names: list[str]) -> Any:
    if not operators:
        return operands[0]
    loosest = min(map(_level, names))
    places = [place for place, name in enumerate(names) if _level(name) == loosest]
    to_right = {names[place][-1] == ":" for place in places}
    if len(to_right) > 1:
        return None  # an error of the compiler
    place = places[0] if to_right.pop() else places[-1]
    left = _group(kind, operands[: place + 1], operators[:place], names[:place])
    right = _group(kind, operands[place + 1 :], operators[place + 1 :], names[place + 1 :])
    return Infix(kind, left, operators[place], right) if left is not None and right is not None else None
