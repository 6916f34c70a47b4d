"""Which tokens of a table-driven language mean nothing: redundant parentheses, trailing commas and semicolons.

A pair of parentheses is redundant if it groups (no call, no list) and the loosest operator inside binds tighter than
its neighbours, by the operators of the table. An operator or word that is not in the table keeps its parentheses.
Cost: linear, about 4 ns a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import LAYOUT, NUMBER, PUNCTUATION, STRING, WORD, hash_of
from lakh.corpus.parsing.table_driven.roles import NO_ROLE, own_operator
from lakh.corpus.parsing.table_driven.syntax import (
    ACCESSOR,
    AFTER,
    APPLICATION,
    ASSIGNMENT,
    BEFORE,
    BINARY,
    BIT_STRINGS,
    BITS,
    BLOCK_PARAMETERS,
    BRACE_SUBSCRIPTS,
    CLOSES,
    DEFINES,
    FLAGS,
    GROUPS,
    HEAD,
    INFIX,
    INFIX_METHODS,
    KEEP_ARGUMENTS,
    KEEP_FIRST,
    KEYWORD,
    LABELS,
    LITERAL_CALLS,
    MACROS,
    OFFSIDE,
    ONE_RESULT,
    OPENS,
    OPERATOR_NAMES,
    OWN,
    OWN_OPERATORS,
    PERL_CALLS,
    PHRASE,
    RECORDS,
    RIGHT_TO_LEFT,
    SEMICOLON_DROPS,
    SYMBOL_RUNS,
    TAKES_LIST,
    TRAILING,
    TRAILING_SEMICOLON,
    TUPLES,
    UNARY_LEVEL,
    WORDS_BEGIN,
)
from lakh.corpus.parsing.word_table import row_of

__all__ = ["mark_redundant_by_table"]

MAX_DEPTH = 256
ATOM, APPLIED, KEEP = 1000, 999, 1 << 20
DEFINITION, CALL_END, BLOCK_END, INFIX_NAME, HEAD_END, GUARD = 2, 3, 4, 5, 6, 7
"""Marks of an = that defines a name, of the ) after a name and of the } of a block (both in Perl alone; in Ruby, the |
after the parameters of a block), of Scala's infix methods, the ) of its `if (a)` and the `if` of a pattern; redundant
tokens have the mark 1. No operand ends at a token whose mark is BLOCK_END or larger."""
LABELLED = 2 * ATOM - 1
ARROW, CASE, DEFINED, DO, FOR, PLACEHOLDER = (hash_of(word) for word in ("=>", "case", "defined", "do", "for", "_"))


@compiled
def _is_variable(c: int) -> bool:
    """Whether a name of Perl begins with its sigil."""
    return c == 36 or c == 64


@compiled
def _follows_function(data: Any, t: int, kinds: Any, starts: Any, ends: Any, rows: Any) -> bool:
    """Whether the token `t` follows a name without a sigil and a blank, as the argument of a call does."""
    if t == 0 or kinds[t - 1] != WORD or ends[t - 1] == starts[t] or rows[t - 1] != NO_ROLE:
        return False
    return not _is_variable(data[starts[t - 1]])


@compiled
def _find_calls(data: Any, count: int, kinds: Any, starts: Any, ends: Any, known: Any, roles: Any, rows: Any) -> None:
    """Perl: a file test is a named unary operator; a name without an operand, or with parentheses, is none."""
    named = row_of(known, DEFINED)
    for t in range(count):
        if kinds[t] != WORD:
            continue
        row = rows[t]
        after = data[starts[t + 1]] if t + 1 < count else np.uint8(59)
        is_punctuation = t + 1 == count or kinds[t + 1] == PUNCTUATION
        if ends[t] == starts[t] + 1 and t > 0 and ends[t - 1] == starts[t] and data[starts[t - 1]] == 45:
            if not is_punctuation and ends[t - 1] == starts[t - 1] + 1:
                rows[t] = named  # -f $path
            continue
        if row == NO_ROLE:
            continue
        is_key = is_punctuation and after == 61 and t + 1 < count and ends[t + 1] == starts[t + 1] + 2
        if is_key and data[starts[t + 1] + 1] == 62:
            rows[t] = NO_ROLE  # x => 1
        elif is_punctuation and after == 125 and t > 0 and data[starts[t - 1]] == 123:
            rows[t] = NO_ROLE  # $a{x}
        elif roles[row, UNARY_LEVEL] > 0:
            if is_punctuation and after in (40, 41, 44, 58, 59, 93, 125):
                rows[t] = NO_ROLE
            elif t + 1 < count and rows[t + 1] != NO_ROLE and after not in (37, 38, 42, 60):
                other = rows[t + 1]
                is_binary = roles[other, BINARY] > 0 and roles[other, UNARY_LEVEL] == 0
                if is_binary or roles[other, BITS] & (ACCESSOR | AFTER | ASSIGNMENT):
                    rows[t] = NO_ROLE  # shift || 1
            elif is_punctuation and after == 38 and ends[t + 1] > starts[t + 1] + 1:
                rows[t] = NO_ROLE  # shift && 1


@compiled
def _ends_operand(data: Any, t: int, kinds: Any, starts: Any, ends: Any, row: int, roles: Any) -> bool:
    """Whether an operator after token `t`, whose row of roles is `row`, is binary."""
    if t < 0 or kinds[t] == LAYOUT:
        return False
    if kinds[t] == PUNCTUATION:
        c = data[ends[t] - 1]
        if row != NO_ROLE and roles[row, BITS] & ACCESSOR:  # a' and <<a>>
            return c == 39 or (c == 62 and data[starts[t]] == 62)
        return c == 41 or c == 93 or c == 125
    if kinds[t] == WORD and row != NO_ROLE:
        if roles[row, BINARY] > 0 or roles[row, UNARY_LEVEL] > 0:
            return False
        return roles[row, BITS] & CLOSES != 0 or roles[row, BITS] & (BEFORE | KEYWORD | OPENS | AFTER) == 0
    return True


@compiled
def _need(roles: Any, row: int, is_unary: bool, group_is_left: bool) -> int:
    """How tightly the operator beside a group binds: twice its level, minus one where an equal one may stand."""
    if is_unary:
        return 2 * roles[row, UNARY_LEVEL] - 1 if roles[row, UNARY_LEVEL] > 0 else KEEP
    level = roles[row, BINARY]
    if level == 0:
        return KEEP
    if roles[row, RIGHT_TO_LEFT] == OWN:
        return 2 * (level + 2)
    allowed = 0 if group_is_left else 1  # the associativity that lets an equal operator stand on this side
    return 2 * level - (roles[row, RIGHT_TO_LEFT] == allowed)


@compiled
def mark_redundant_by_table(data: Any, count: int, hashes: Any, kinds: Any, starts: Any, ends: Any, rules: Any, bytes_of: Any, known: Any, roles: Any, rows: Any, drop: Any) -> None:  # fmt: skip  # noqa: E501
    """Set drop[t] to 1 for every token that the normal form leaves out; `rows` is as lex_table fills it."""
    flags = rules[FLAGS]
    for t in range(count):
        drop[t] = 0
    separators = bytes_of[41] | bytes_of[93] | bytes_of[125]
    if not flags & (GROUPS | SEMICOLON_DROPS) and not separators & (TRAILING | TRAILING_SEMICOLON):
        return  # Markdown, shell scripts and the like
    for t in range(count):
        if kinds[t] != WORD and kinds[t] != PUNCTUATION:
            rows[t] = NO_ROLE
        is_named = kinds[t] == WORD or flags & INFIX_METHODS != 0
        is_named = is_named and t > 0 and rows[t] != NO_ROLE and rows[t - 1] != NO_ROLE
        if is_named and roles[rows[t - 1], BITS] & ACCESSOR and ends[t - 1] == starts[t]:
            rows[t] = NO_ROLE  # a.return, a.+(b)
        if flags & OWN_OPERATORS and rows[t] == NO_ROLE and kinds[t] == PUNCTUATION and ends[t] > starts[t] + 1:
            rows[t] = own_operator(data, starts[t], ends[t], known)
    if flags & PERL_CALLS:
        _find_calls(data, count, kinds, starts, ends, known, roles, rows)
    opened = np.zeros(MAX_DEPTH + 1, np.int64)  # per bracket: its token
    need = np.zeros(MAX_DEPTH + 1, np.int64)  # of the token before it; KEEP for a bracket that does not group
    inside = np.zeros(MAX_DEPTH + 1, np.int64)  # the loosest operator directly in it; 0 if it is no expression
    commas = np.zeros(MAX_DEPTH + 1, np.int64)
    follows = np.zeros(MAX_DEPTH + 1, np.bool_)  # a call or a subscript
    defines = np.zeros(MAX_DEPTH + 1, np.bool_)  # the next = defines a name
    holds = np.zeros(MAX_DEPTH + 1, np.bool_)  # Scala: _ as a whole argument
    in_case = np.zeros(MAX_DEPTH + 1, np.bool_)  # Scala: between `case` and =>; Ruby: between the | of a block
    need[0] = KEEP
    inside[0] = ATOM
    depth = 0
    beyond = 0
    for t in range(count):
        kind = kinds[t]
        if kind == LAYOUT:
            inside[depth] = 0
            continue
        row = rows[t]
        c = data[starts[t]]
        size = ends[t] - starts[t]
        is_bit_string = flags & BIT_STRINGS and size == 2 and kind == PUNCTUATION and data[starts[t] + 1] == c
        is_opening = kind == PUNCTUATION and (
            (size == 1 and (c == 40 or c == 91 or c == 123)) or (is_bit_string and c == 60)
        )
        after_operand = False  # outside of groups, it only matters before a bracket and in Scala
        if t > 0 and drop[t - 1] < BLOCK_END and (is_opening or need[depth] != KEEP or flags & INFIX_METHODS):
            after_operand = _ends_operand(data, t - 1, kinds, starts, ends, rows[t - 1], roles)
        if flags & INFIX_METHODS and kind == WORD:
            if row != NO_ROLE:
                if roles[row, BITS] & HEAD:
                    is_generator = depth > 0 and opened[depth] > 0 and hashes[opened[depth] - 1] == FOR
                    if after_operand or in_case[depth] or is_generator:
                        drop[t] = GUARD
                elif roles[row, BITS] & KEYWORD:
                    in_case[depth] = hashes[t] == CASE
            elif hashes[t] != PLACEHOLDER:
                if after_operand:
                    drop[t] = INFIX_NAME
                    inside[depth] = min(inside[depth], rules[INFIX])
                continue
            else:
                if after_operand or _is_argument(data, t, count, kinds, starts, ends):
                    holds[depth] = not after_operand
                    inside[depth] = 0
                elif need[depth] != KEEP:
                    inside[depth] = 0  # (_ + 1) is a function
                continue
        if flags & BLOCK_PARAMETERS and kind == PUNCTUATION and c == 124 and size == 1:
            if t > 0 and (hashes[t - 1] == DO or (kinds[t - 1] == PUNCTUATION and data[starts[t - 1]] == 123)):
                in_case[depth] = True
                continue
            if in_case[depth]:
                in_case[depth] = False
                drop[t] = BLOCK_END
                continue
        if is_opening:
            if depth == MAX_DEPTH:
                beyond += 1
                continue
            if after_operand:
                if c == 123 and not flags & (BRACE_SUBSCRIPTS | LITERAL_CALLS):
                    inside[depth] = 0
                elif flags & APPLICATION:
                    inside[depth] = min(inside[depth], APPLIED)
            wanted = KEEP
            if c == 40 and flags & GROUPS:
                wanted = _left_need(data, t, kinds, starts, ends, flags, rules[INFIX], rows, roles, drop, after_operand)
            depth += 1
            opened[depth], need[depth], inside[depth], commas[depth] = t, wanted, ATOM, 0
            follows[depth] = after_operand
            holds[depth] = in_case[depth] = False
            defines[depth] = c == 123 and flags & RECORDS != 0
            continue
        if kind == PUNCTUATION and ((size == 1 and (c == 41 or c == 93 or c == 125)) or (is_bit_string and c == 62)):
            if beyond > 0:
                beyond -= 1
                continue
            if depth == 0:
                continue
            first = opened[depth]
            is_group = c == 41 and data[starts[first]] == 40 and need[depth] != KEEP and t - 1 > first
            before = data[starts[t - 1]] if kinds[t - 1] == PUNCTUATION and ends[t - 1] == starts[t - 1] + 1 else 0
            if before == 44 and bytes_of[c] & TRAILING and t - 2 > first:
                is_tuple = c == 41 and flags & TUPLES and commas[depth] == 1 and is_group
                if not (kinds[t - 2] == PUNCTUATION and data[starts[t - 2]] == 44) and not is_tuple:
                    drop[t - 1] = 1
            elif before == 59 and bytes_of[c] & TRAILING_SEMICOLON:
                drop[t - 1] = 1
            lowest, left = inside[depth], need[depth]
            is_list = commas[depth] > 0
            if is_list and lowest == rules[PHRASE] and lowest > 0:
                is_list = not _is_statement_call(data, t, first, count, kinds, starts, rows, roles, drop, rules[PHRASE])
            depth -= 1
            if flags & PERL_CALLS:
                if c == 41 and first > 0 and kinds[first - 1] == WORD:
                    drop[t] = CALL_END
                elif c == 125 and _is_block(data, first, kinds, starts, ends, rows, roles, drop):
                    drop[t] = BLOCK_END
            elif flags & INFIX_METHODS and c == 41:
                before_it = rows[first - 1] if first > 0 else NO_ROLE
                if before_it != NO_ROLE and roles[before_it, BITS] & HEAD and drop[first - 1] != GUARD:
                    drop[t] = HEAD_END
                if holds[depth + 1] and need[depth] != KEEP:
                    inside[depth] = 0  # (f(_) + 1) is a function
            if not is_group:
                continue
            outer_opens = depth > 0 and opened[depth] == first - 1 and need[depth] != KEEP
            closes = t + 1 < count and kinds[t + 1] == PUNCTUATION and data[starts[t + 1]] == 41
            redundant = outer_opens and closes  # ((x))
            if lowest == rules[PHRASE] and lowest > 0:
                ends_here = t + 1 == count or kinds[t + 1] == LAYOUT
                if not ends_here and kinds[t + 1] == WORD and rows[t + 1] != NO_ROLE:
                    ends_here = roles[rows[t + 1], BITS] & CLOSES != 0  # the line end before it means nothing
                if flags & PERL_CALLS:
                    ends_here = _ends_list(data, t, count, kinds, starts, rows, roles) and (
                        not is_list or (rows[first + 1] != NO_ROLE and roles[rows[first + 1], BITS] & TAKES_LIST != 0)
                    )
                elif flags & MACROS:
                    ends_here = ends_here and data[starts[first + 1]] == 64 and not is_list  # a && (@b c)
                if ends_here:
                    redundant = redundant or _begins_call(t, first, kinds, rows, roles)  # a || (f b, c)
            if not redundant and not is_list and lowest > 0:
                is_complete = _ends_operand(data, t - 1, kinds, starts, ends, rows[t - 1], roles)
                is_complete = is_complete and drop[t - 1] < BLOCK_END
                right = _right_need(data, t, count, kinds, starts, ends, flags, rules[INFIX], rows, roles)
                if in_case[depth] and t + 1 < count and hashes[t + 1] == ARROW:
                    right = 0  # case a if (b) =>
                beside_operator = left > 0 or right > 0
                is_own = right < KEEP and right > 0 and roles[rows[t + 1], RIGHT_TO_LEFT] == OWN
                if is_own and roles[rows[t + 1], BINARY] == lowest:
                    right = 0  # (a . b) . c
                redundant = is_complete and 2 * lowest > left and 2 * lowest > right
                is_before_word = t + 1 < count and flags & MACROS and kinds[t + 1] == WORD
                if lowest == rules[PHRASE] and t + 1 < count and (data[starts[t + 1]] == 44 or is_before_word):
                    redundant = False  # (f a), b and (@f a) for b
                if flags & ONE_RESULT and not beside_operator and t - first > 2 and lowest == ATOM:
                    ending = data[ends[t - 1] - 1]
                    if kinds[t - 1] == STRING or ending == 41 or ending == 125:
                        redundant = False  # (f()) has one value
                if left == LABELLED and t - first == 2 and lowest == ATOM:
                    redundant = right != KEEP or _begins_argument(data, t + 1, kinds, starts, rows)  # ~a:(b) c
                if flags & INFIX_METHODS and t - first == 2 and kinds[t - 1] == NUMBER and first > 0:
                    unary = roles[rows[first - 1], UNARY_LEVEL] if rows[first - 1] != NO_ROLE else 0
                    if unary > 0 and left == 2 * unary - 1:
                        redundant = False  # -(1) calls a method
                if flags & PERL_CALLS and t - first == 2 and kinds[t - 1] == WORD and first > 0:
                    before = data[starts[first - 1]]
                    is_key = before == 45 or (before == 123 and t + 1 < count and data[starts[t + 1]] == 125)
                    if is_key and not _is_variable(data[starts[t - 1]]):
                        redundant = False  # $a{(B)} and -(b), where b is no string
                is_argument = depth > 0 and follows[depth] and data[starts[opened[depth]]] == 40
                if flags & KEEP_ARGUMENTS and not beside_operator and is_argument:
                    redundant = False  # f((x)) passes a copy
            if redundant:
                drop[first] = drop[t] = 1
                if is_list:
                    commas[depth] += 1
            inside[depth] = min(inside[depth], lowest) if redundant else inside[depth]
            continue
        if kind == PUNCTUATION and c == 59 and flags & SEMICOLON_DROPS and ends[t] == starts[t] + 1:
            is_call = t + 1 < count and kinds[t + 1] == PUNCTUATION and data[starts[t + 1]] == 40
            if not is_call and (depth == 0 or data[starts[opened[depth]]] != 123):
                drop[t] = 1
        if kind == PUNCTUATION and size == 1 and (c == 59 or c == 61):
            if c == 61 and defines[depth]:
                drop[t] = DEFINITION
            is_record = depth > 0 and data[starts[opened[depth]]] == 123 and flags & RECORDS != 0
            defines[depth] = c == 59 and is_record  # { a = x; b = y }
        if kind == PUNCTUATION and c == 44:
            commas[depth] += 1
            continue
        if flags & INFIX_METHODS:
            if hashes[t] == ARROW:
                in_case[depth] = False
            elif kind == STRING and after_operand and ends[t - 1] == starts[t]:
                continue  # s"a"
            elif kind == PUNCTUATION and row == NO_ROLE and _is_method_name(data, t, count, starts):
                continue  # a.+(b)
        if row != NO_ROLE and kind == WORD:
            if roles[row, BITS] & DEFINES:
                defines[depth] = True
            elif roles[row, BITS] & AFTER:
                defines[depth] = False
        if need[depth] == KEEP:
            continue
        # the level of this token, directly inside a group
        if kind == PUNCTUATION and row != NO_ROLE and roles[row, BINARY] > 0 and not after_operand:
            if c == 58 and size == 1 and t + 1 < count and kinds[t + 1] == WORD and ends[t] == starts[t + 1]:
                continue  # the symbol :a
            if flags & OPERATOR_NAMES and t > 1 and data[starts[t - 1]] == 46 and kinds[t - 2] == WORD:
                continue  # Kernel.++(a, b)
        if flags & (LABELS | PERL_CALLS) and kind == PUNCTUATION and t + 1 < count and ends[t] == starts[t + 1]:
            if flags & LABELS:
                is_label = size == 1 and (c == 96 or (after_operand and (c == 126 or c == 63)))
                if is_label and kinds[t + 1] == WORD:
                    if after_operand:
                        inside[depth] = min(inside[depth], APPLIED)  # f ~a `B
                    continue
            elif c in (37, 38, 42) and size == 1 and not after_operand:
                continue  # %a
            elif c in (37, 38, 42, 43, 45, 47, 60) and _follows_function(data, t, kinds, starts, ends, rows):
                inside[depth] = min(inside[depth], rules[PHRASE])  # f %a
                continue
        if row == NO_ROLE or (kind == WORD and roles[row, BINARY] == 0 and roles[row, UNARY_LEVEL] == 0):
            is_keyword = row != NO_ROLE and roles[row, BITS] & KEYWORD
            if is_keyword and flags & OPERATOR_NAMES and t + 1 < count and ends[t] == starts[t + 1]:
                is_keyword = data[starts[t + 1]] != 40  # if(a, do: b) is a call
            if kind == PUNCTUATION or (is_keyword and (flags & MACROS or not (after_operand and rules[PHRASE] > 0))):
                inside[depth] = 0
            elif after_operand and not (kind == STRING and flags & LITERAL_CALLS):
                inside[depth] = min(inside[depth], APPLIED if flags & APPLICATION else rules[PHRASE])
        elif roles[row, BITS] & (ASSIGNMENT | KEYWORD):
            inside[depth] = 0
        elif after_operand and roles[row, BINARY] > 0:
            inside[depth] = min(inside[depth], roles[row, BINARY])
        elif not after_operand and roles[row, UNARY_LEVEL] > 0:
            inside[depth] = min(inside[depth], roles[row, UNARY_LEVEL])
        elif not roles[row, BITS] & ACCESSOR:
            inside[depth] = 0


@compiled
def _is_statement_call(data: Any, t: int, first: int, count: int, kinds: Any, starts: Any, rows: Any, roles: Any, marks: Any, phrase: int) -> bool:  # fmt: skip  # noqa: E501
    """Whether the group is a statement's call without parentheses before a looser operator: (open $x, $y) or die."""
    if t + 1 >= count or not _begins_call(t, first, kinds, rows, roles):
        return False
    begins = first == 0 or marks[first - 1] == BLOCK_END
    if not begins and not (kinds[first - 1] == PUNCTUATION and data[starts[first - 1]] in (59, 123)):
        return False
    name = data[starts[first + 1]]
    is_looser = rows[t + 1] != NO_ROLE and 0 < roles[rows[t + 1], BINARY] < phrase
    return is_looser and name != 36 and name != 64


@compiled
def _begins_call(t: int, first: int, kinds: Any, rows: Any, roles: Any) -> bool:
    """Whether the group from `first` to `t` begins with a name and an argument."""
    if first + 2 >= t or kinds[first + 1] != WORD or kinds[first + 2] == PUNCTUATION:
        return False
    row = rows[first + 1]
    if row != NO_ROLE and not roles[row, BITS] & TAKES_LIST:
        return False
    row = rows[first + 2]
    if row == NO_ROLE or roles[row, BITS] & (KEYWORD | TAKES_LIST):  # my
        return True
    return kinds[first + 2] == WORD and roles[row, UNARY_LEVEL] > 0


@compiled
def _ends_list(data: Any, t: int, count: int, kinds: Any, starts: Any, rows: Any, roles: Any) -> bool:
    """Whether the arguments of a call without parentheses would end before the token after `t`."""
    n = t + 1
    if n == count or kinds[n] == LAYOUT:
        return True
    if kinds[n] == PUNCTUATION:
        return data[starts[n]] in (41, 59, 93, 125)
    return rows[n] != NO_ROLE and roles[rows[n], BITS] & AFTER != 0


@compiled
def _is_block(data: Any, first: int, kinds: Any, starts: Any, ends: Any, rows: Any, roles: Any, marks: Any) -> bool:
    """Whether the brace `first` of Perl opens a block that is no operand: if (a) {, else {, map {."""
    p = first - 1
    if p < 0 or marks[p] == CALL_END or marks[p] == BLOCK_END:
        return True
    c = data[starts[p]]
    if kinds[p] != WORD:
        return kinds[p] == PUNCTUATION and c == 59
    if _is_variable(c) or (rows[p] != NO_ROLE and roles[rows[p], BITS] & KEYWORD):
        return False
    is_name = p > 0 and kinds[p - 1] == PUNCTUATION and ends[p - 1] == starts[p]
    return not (is_name and data[starts[p - 1]] in (37, 38, 42, 45, 58))


@compiled
def _begins_argument(data: Any, t: int, kinds: Any, starts: Any, rows: Any) -> bool:
    """Whether the token `t` of OCaml begins the next argument, and no operator or access."""
    if kinds[t] == PUNCTUATION:
        return data[starts[t]] in (40, 91, 123, 126, 63)
    return kinds[t] != WORD or rows[t] == NO_ROLE


@compiled
def _is_method_name(data: Any, t: int, count: int, starts: Any) -> bool:
    """Whether the operator `t` stands between a point and a parenthesis."""
    return t > 0 and t + 1 < count and data[starts[t - 1]] == 46 and data[starts[t + 1]] == 40


@compiled
def _is_argument(data: Any, t: int, count: int, kinds: Any, starts: Any, ends: Any) -> bool:
    """Whether the token `t` is a whole argument, as in f(_)."""
    if t == 0 or t + 1 >= count or kinds[t - 1] != PUNCTUATION or kinds[t + 1] != PUNCTUATION:
        return False
    return data[starts[t - 1]] in (40, 44) and data[starts[t + 1]] in (41, 44)


@compiled
def _left_need(data: Any, t: int, kinds: Any, starts: Any, ends: Any, flags: int, infix: int, rows: Any, roles: Any, marks: Any, after_operand: bool) -> int:  # fmt: skip  # noqa: E501
    """The need of the token before the parenthesis `t`."""
    p = t - 1
    if p < 0 or kinds[p] == LAYOUT:
        return KEEP if flags & KEEP_FIRST else 0
    if marks[p] >= BLOCK_END:
        return 2 * infix if marks[p] == INFIX_NAME else 0
    if after_operand:
        return KEEP
    row = rows[p]
    is_adjacent = kinds[p] == PUNCTUATION and ends[p] == starts[t]
    if flags & SYMBOL_RUNS and is_adjacent and data[starts[p]] in (33, 36, 64, 126):
        return KEEP  # x@(y) and $(y)
    if row == NO_ROLE:
        c = data[starts[p]]
        if flags & SYMBOL_RUNS and kinds[p] == PUNCTUATION and c not in (40, 41, 44, 59, 91, 93, 123, 125):
            return 2 * APPLIED - 1  # an operator with a precedence of its own
        if kinds[p] == PUNCTUATION and ends[p] == starts[p] + 1:
            if c == 59:
                return KEEP if flags & KEEP_FIRST else 0
            if c == 40 or c == 91 or c == 123 or c == 44:
                return 0
        return KEEP
    if roles[row, BITS] & BEFORE or (roles[row, BITS] & ASSIGNMENT and roles[row, BINARY] == 0):
        return 0
    if marks[p] == DEFINITION:
        return 0
    if roles[row, BITS] & OPENS and kinds[p] == WORD:
        return KEEP if flags & KEEP_FIRST else 0
    if roles[row, BITS] & ACCESSOR and roles[row, BINARY] == 0:
        is_label = flags & LABELS and data[starts[p]] == 58 and p > 1 and kinds[p - 1] == WORD
        if is_label and data[starts[p - 2]] in (63, 126) and ends[p - 2] == starts[p - 1]:
            return LABELLED
        return KEEP
    if flags & PERL_CALLS and kinds[p] == WORD and roles[row, UNARY_LEVEL] > 0:
        return KEEP  # -f (a) is a call
    is_unary = p == 0 or marks[p - 1] >= BLOCK_END
    is_unary = is_unary or not _ends_operand(data, p - 1, kinds, starts, ends, rows[p - 1], roles)
    if is_unary and p > 0 and flags & OFFSIDE and kinds[p - 1] == LAYOUT and roles[row, UNARY_LEVEL] == 0:
        is_unary = False  # a line that begins with an operator
    return _need(roles, row, is_unary, False)


@compiled
def _right_need(data: Any, t: int, count: int, kinds: Any, starts: Any, ends: Any, flags: int, infix: int, rows: Any, roles: Any) -> int:  # fmt: skip  # noqa: E501
    """The need of the token after the closing parenthesis `t`."""
    n = t + 1
    if n >= count or kinds[n] == LAYOUT:
        return 0
    row = rows[n]
    is_unknown = kinds[n] == PUNCTUATION and row == NO_ROLE
    if flags & SYMBOL_RUNS and is_unknown and data[starts[n]] not in (40, 41, 44, 59, 91, 93, 123, 125):
        return 2 * APPLIED - 1
    if row != NO_ROLE:
        if roles[row, BITS] & (AFTER | CLOSES):
            return 0
        if flags & INFIX_METHODS and roles[row, BITS] & HEAD:
            return 0  # case a :: (b) if c
        if flags & PERL_CALLS and kinds[n] == WORD and data[starts[n]] == 120:
            return KEEP  # (a) x 3 repeats a list
        if roles[row, BITS] & ASSIGNMENT and roles[row, BINARY] == 0:
            return KEEP
        if kinds[n] == WORD and flags & WORDS_BEGIN and roles[row, BINARY] == 0:
            return 0  # the next statement
        return _need(roles, row, False, True)
    c = data[starts[n]]
    if kinds[n] == PUNCTUATION and ends[n] == starts[n] + 1 and c in (41, 93, 125, 44, 59):
        return 0
    if kinds[n] == WORD and flags & WORDS_BEGIN:
        return 0  # the next statement
    return 2 * infix - 1 if kinds[n] == WORD and flags & INFIX_METHODS else KEEP
