"""Infix expressions of Scala are grouped as the Scala Language Specification says, whatever the grammar's tree is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from bench.corpus.scala_infix import Infix, holds_placeholder, infix_tree


@dataclass
class Node:
    """What a node of tree-sitter offers."""

    type: str
    start_byte: int
    end_byte: int
    children: list[Node] = field(default_factory=list)
    parent: Node | None = None


def chain(text: str) -> Node:
    """The tree of a flat grammar: every operator is as loose as the others and associates to the left."""
    tokens, at = [], 0
    for word in text.split():
        at = text.index(word, at)
        tokens.append(Node("wildcard" if word == "_" else "identifier", at, at + len(word)))
        at += len(word)
    left = tokens[0]
    for place in range(1, len(tokens), 2):
        parts = [left, *tokens[place : place + 2]]
        left = Node("infix_expression", left.start_byte, parts[-1].end_byte, parts)
        for part in parts:
            part.parent = left
    return left


def shown(tree: Any, text: str) -> str:
    if not isinstance(tree, Infix):
        return text[tree.start_byte : tree.end_byte]
    operator = text[tree.operator.start_byte : tree.operator.end_byte]
    return f"({shown(tree.left, text)} {operator} {shown(tree.right, text)})"


@pytest.mark.parametrize(
    ("text", "grouped"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a * b + c", "((a * b) + c)"),
        ("a - b - c", "((a - b) - c)"),
        ("a :: b :: c", "(a :: (b :: c))"),
        ("a foo b + c bar d", "((a foo (b + c)) bar d)"),
        ("a += b foo c", "(a += (b foo c))"),
        ("a <= b && c", "((a <= b) && c)"),
        ("a | b ^ c & d == e < f :+ g + h * i ~> j", "(a | (b ^ (c & (d == (e < (f :+ (g + (h * (i ~> j)))))))))"),
    ],
)
def test_the_first_character_of_an_operator_decides(text: str, grouped: str) -> None:
    assert shown(infix_tree(chain(text), text.encode()), text) == grouped


def test_operators_of_one_level_that_associate_both_ways_are_ambiguous() -> None:
    assert infix_tree(chain("a + b +: c"), b"a + b +: c") is None


def test_parentheses_around_a_placeholder_make_a_function() -> None:
    tree = chain("a + _ * c")
    assert holds_placeholder(tree, 4, 9)
    assert not holds_placeholder(tree, 0, 1)
