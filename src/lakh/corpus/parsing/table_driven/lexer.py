"""The tokens of a text by the table of its language. Comments are left out; so are line ends that end no statement.

A line end is a LAYOUT token where the language ends a statement there: not in brackets, after an operator or a word
that opens a block, or before a token that continues the line. With `offside`, indentation is LAYOUT too.

`lex_table` is one long function because numba does not inline its parts. Cost: linear, about 12 ns a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import (
    DEDENT,
    INDENT,
    LAYOUT,
    MAX_INDENTS,
    MAX_UNCLOSED,
    NEWLINE,
    NUMBER,
    PUNCTUATION,
    STRING,
    WORD,
    hash_bytes,
    hash_of,
)
from lakh.corpus.parsing.literals import end_of_line, end_of_regex, end_of_verbatim
from lakh.corpus.parsing.table_driven.characters import (
    begins_line,
    hash_lower,
    is_end_mark,
    is_operator_character,
    is_symbol,
    line_breaks,
)
from lakh.corpus.parsing.table_driven.comments import end_of_comment
from lakh.corpus.parsing.table_driven.literals import (
    closing_of,
    end_of_bar_braces,
    end_of_character,
    end_of_delimited,
    end_of_dollar_quotes,
    end_of_heredoc,
    end_of_long_bracket,
    end_of_perl_quotes,
    end_of_r_raw,
    end_of_raw_triple_quotes,
    end_of_string,
    end_of_triple_quotes,
    heredoc_tag,
    is_letter,
)
from lakh.corpus.parsing.table_driven.roles import NO_ROLE, infix_operator, operator_bytes
from lakh.corpus.parsing.table_driven.syntax import (
    ACCESSOR,
    AMPERSAND,
    ASSIGNMENT,
    BACKSLASH_CHARACTER,
    BACKTICK,
    BAR_BRACES,
    BINARY,
    BIT_STRINGS,
    BITS,
    BLOCK_WORD,
    CASELESS,
    CHARACTER,
    CLOSES,
    COMMENT_START,
    CONTINUATION,
    DIRECTIVES,
    DOLLAR_CHARACTER,
    DOLLAR_QUOTES,
    DOUBLE,
    ELLIPSIS,
    ENDS,
    FLAGS,
    FREE_IN,
    HEAD,
    HERE_STRING,
    INFIX_METHODS,
    INSIDE,
    KEYWORD,
    LEADING,
    LINE_STRINGS,
    LITERALS,
    LONG_BRACKET,
    MULTILINE_REGEX,
    NEWLINE_WORD,
    OFFSIDE,
    OPENS,
    OPERATOR_START,
    OWN_OPERATORS,
    PERL_QUOTES,
    PHP_TEXT,
    POD,
    POINT_NUMBERS,
    QUALIFIED,
    QUESTION_CHARACTER,
    R_RAW,
    RAW_TRIPLE,
    REGEX_AFTER_BLANK,
    REGEX_FOLLOWS,
    RUBY_HEREDOC,
    RUBY_PERCENT,
    SEMICOLON_ENDS,
    SHELL_EXPANSION,
    SHELL_HEREDOC,
    SIGILS,
    SINGLE,
    SLASH_REGEX,
    SYMBOL_RUNS,
    TRANSPOSE,
    TRIPLE,
    UNARY_LEVEL,
    UNICODE_OPERATORS,
    VERBATIM,
)
from lakh.corpus.parsing.word_table import row_of

__all__ = ["lex_table"]

MAX_BRACKETS = 256  # deeper ones count as the deepest
MAX_OPERATOR = 4
OPERATOR_STARTS = (36, 37, 38, 42, 43, 45, 47, 60, 61, 62, 64, 94, 124)
"""The bytes with which an infix operator of OCaml may begin; every symbol after them belongs to it."""
SPECIAL_VARIABLES = (33, 34, 38, 39, 44, 46, 47, 59, 60, 62, 63, 92, 96, 124)
"""The bytes after the $ of Perl's variables $! $' $> and the like."""
MAX_HEREDOCS = 8
ARROW, CASE = hash_of("=>"), hash_of("case")


@compiled
def lex_table(data: Any, begin: int, end: int, rules: Any, classes: Any, bytes_of: Any, comments: Any, known: Any, roles: Any, hashes: Any, kinds: Any, starts: Any, ends: Any, stats: Any, rows: Any) -> int:  # fmt: skip  # noqa: E501
    """Fill per token its hash, kind, first byte and end, as lexer.lex does; return the number of tokens.

    rows[t] becomes the row of each word and operator in `roles`, or NO_ROLE; it is not set for other tokens.
    """
    flags, literals = rules[FLAGS], rules[LITERALS]
    lower = np.empty(64, np.uint8)
    brackets = np.zeros(MAX_BRACKETS + 1, np.uint8)
    is_head = np.zeros(MAX_BRACKETS + 1, np.bool_)  # the parentheses after `if`, where a line end means nothing
    has_block = np.zeros(MAX_BRACKETS + 1, np.bool_)  # a layout block began in the bracket
    depth = 0
    indents = np.zeros(MAX_INDENTS, np.int64)
    indent_level = 0
    tags = np.zeros((MAX_HEREDOCS, 2), np.int64)
    num_tags = 0
    count = 0
    pending = False  # a line ended since the last token
    after_head = False
    in_directive = False
    line_begin = begin
    unclosed = 0
    in_data = False  # after __END__: lines of data, and documentation
    last_role = NO_ROLE
    case_depth = -1  # of the brackets around a `case` of Scala whose => has not come
    for k in range(4):
        stats[k] = 0
    if end - begin > 2 and data[begin] == 0xEF and data[begin + 1] == 0xBB and data[begin + 2] == 0xBF:
        begin += 3  # a byte order mark
    i = begin
    if literals & PHP_TEXT:  # text up to <? is no program
        while i < end and not (data[i] == 60 and i + 1 < end and data[i + 1] == 63):
            i += 1
        if i > begin:
            hashes[0], kinds[0], starts[0], ends[0] = hash_bytes(data, begin, i), STRING, begin, i
            count = 1
    while i < end:
        c = data[i]
        kind = classes[c]
        if kind == 1:
            i += 1
            continue
        if kind == 4:
            i += 1
            line_begin = i
            for n in range(num_tags):  # the bodies of here-documents
                found = end_of_heredoc(data, i, end, tags[n, 0], tags[n, 1], literals & PHP_TEXT != 0)
                if found < 0:
                    break
                hashes[count], kinds[count], starts[count], ends[count] = hash_bytes(data, i, found), STRING, i, found
                count += 1
                stats[1] += found - i
                stats[3] += found - i
                i = found
                if not literals & PHP_TEXT and i < end and data[i] == 13:
                    i += 1
                if not literals & PHP_TEXT and i < end:
                    i += 1
                line_begin = i
            num_tags = 0
            is_free = depth > 0 and bytes_of[brackets[depth]] & FREE_IN and not has_block[depth]
            ends_statement = flags & ENDS and not is_free
            if (in_directive or ends_statement) and not after_head:
                pending = True
            in_directive = False
            continue
        # --- comments and continued lines --------------------------------------------------------------------------
        if bytes_of[c] & COMMENT_START and unclosed < MAX_UNCLOSED:
            k = end_of_comment(data, i, begin, end, rules, classes, comments)
            if k > 0:
                stats[0] += k - i
                i = k
                continue
            if k < 0:
                unclosed += 1
        if c == rules[CONTINUATION] and c > 0:
            k = i + 1
            if k < end and data[k] == 13:
                k += 1
            if k < end and data[k] == 10:
                i = k + 1
                line_begin = i
                continue
        if c == 46 and literals & ELLIPSIS and i + 2 < end and data[i + 1] == 46 and data[i + 2] == 46:
            k = end_of_line(data, i, end)
            stats[0] += max(k - i - 3, 0)
            i = k + 1
            line_begin = i
            continue
        if c == 38 and literals & AMPERSAND:
            k = i + 1
            while k < end and classes[data[k]] == 1:
                k += 1
            if k >= end or data[k] == 10 or data[k] == 33:
                i = end_of_line(data, k, end) + 1
                while i < end:  # comments and empty lines may follow, then an optional &
                    k = i
                    while k < end and classes[data[k]] == 1:
                        k += 1
                    if k < end and (data[k] == 10 or (data[k] == 33 and not (k + 1 < end and data[k + 1] == 36))):
                        k = end_of_line(data, k, end)
                        i = k + 1
                        continue
                    if k < end and data[k] == 38:
                        i = k + 1
                    break
                i = min(i, end)
                continue
            if count > 0 and begins_line(data, i, begin):
                i += 1
                continue
        if in_data:
            k = end_of_line(data, i, end)
            hashes[count], kinds[count], starts[count], ends[count] = hash_bytes(data, i, k), STRING, i, k
            count += 1
            stats[1] += k - i
            stats[3] += k - i
            i = k
            continue
        # --- one token ---------------------------------------------------------------------------------------------
        token_end = i + 1
        token_kind = PUNCTUATION
        k = 0  # end of the literal that begins here; 0 without a literal, -1 if it has no end
        previous = data[i - 1] if i > begin else np.uint8(10)
        following = data[i + 1] if i + 1 < end else np.uint8(10)
        last_kind = kinds[count - 1] if count > 0 else LAYOUT
        adjacent = count > 0 and ends[count - 1] == i and last_kind != LAYOUT
        is_operand = False  # whether an operand ends before this token
        if count > 0 and not pending:
            if last_kind == WORD:
                is_operand = last_role == NO_ROLE or (
                    roles[last_role, BINARY] == 0
                    and roles[last_role, UNARY_LEVEL] == 0
                    and roles[last_role, BITS] & (REGEX_FOLLOWS | OPENS) == 0
                )
            elif last_kind == PUNCTUATION:
                b = data[ends[count - 1] - 1]
                is_operand = b == 41 or b == 93 or b == 125
            else:
                is_operand = last_kind != LAYOUT
        is_name = kind == 2 or (
            kind == INSIDE and c == 45 and is_letter(following) and not (adjacent and is_operand)  # -Path
        )
        if is_name and c == 36 and unclosed < MAX_UNCLOSED:
            if literals & DOLLAR_CHARACTER and i + 1 < end:  # $a of Erlang
                k = i + 2 + (following == 92)
            elif literals & SHELL_EXPANSION and following == 39:
                k = end_of_delimited(data, i + 2, end, 39, False, False)
            elif literals & DOLLAR_QUOTES:
                k = max(0, end_of_dollar_quotes(data, i, end))
            elif literals & PERL_QUOTES and following in SPECIAL_VARIABLES:
                k = i + 2
            if k > 0:
                token_end, token_kind = k, STRING
        if k > 0:
            pass
        elif c >= 0xC2 and flags & UNICODE_OPERATORS and operator_bytes(data, i, end, known) > 0:
            token_end = i + operator_bytes(data, i, end, known)
        elif is_name:
            j = i + 1
            while j < end:
                b = classes[data[j]]
                if b == 2 or b == 3:
                    if data[j] >= 0xC2 and flags & UNICODE_OPERATORS and operator_bytes(data, j, end, known) > 0:
                        break
                    j += 1
                elif b == INSIDE:
                    if (c == 36 or c == 64) and data[j] == 45:  # $a-$b
                        break
                    after = data[j + 1] if j + 1 < end else np.uint8(10)
                    if data[j] == 33 or data[j] == 63:  # save! and empty?, not a != b
                        if after != 61:
                            j += 1
                        break
                    j += 1
                elif data[j] == 46 and flags & QUALIFIED and 65 <= c <= 90 and j + 1 < end and is_letter(data[j + 1]):
                    j += 1
                else:
                    break
            token_end, token_kind = j, WORD
            size = j - i
            if j + 1 < end and data[j] == 46 and flags & QUALIFIED and 65 <= c <= 90 and is_symbol(data[j + 1]):
                j += 2  # M.+
                while j < end and is_symbol(data[j]):
                    j += 1
                token_end, token_kind = j, PUNCTUATION
            if unclosed >= MAX_UNCLOSED:
                pass
            elif literals & PERL_QUOTES and size <= 2 and j < end:
                is_quoting = (
                    size == 1 and (c == 113 or c == 109 or c == 115 or c == 121)  # q m s y
                ) or (size == 2 and (
                    (c == 113 and data[i + 1] in (113, 119, 120, 114)) or (c == 116 and data[i + 1] == 114)
                ))  # fmt: skip
                is_key = data[j] == 125 or previous == 62 or previous == 36 or previous == 64 or previous == 37
                if is_quoting and not is_key and not (previous == 38 and adjacent):
                    k = max(0, end_of_perl_quotes(data, j, end, size))
            elif literals & R_RAW and size == 1 and (c | 32) == 114 and j < end and (data[j] == 34 or data[j] == 39):
                k = max(0, end_of_r_raw(data, j, end))
            elif literals & (PERL_QUOTES | RUBY_HEREDOC) and is_end_mark(data, i, j):
                k = j if literals & POD else end
                in_data = literals & POD != 0
            if k > 0:
                token_end, token_kind = k, STRING
        elif kind == 3 or (c == 46 and classes[following] == 3 and not is_operand):
            j = i + 1
            is_hex = c == 48 and j < end and (data[j] | 32) == 120
            while j < end and (
                classes[data[j]] == 2
                or classes[data[j]] == 3
                or (data[j] == 46 and j + 1 < end and classes[data[j + 1]] == 3)
                or (
                    (data[j] == 43 or data[j] == 45)
                    and ((data[j - 1] | 32) == 101 or (data[j - 1] | 32) == 100)
                    and not is_hex
                    and j + 1 < end
                    and classes[data[j + 1]] == 3
                )
            ):
                j += 1
            if literals & POINT_NUMBERS and j < end and data[j] == 46 and not is_hex:  # 3.
                after = data[j + 1] if j + 1 < end else np.uint8(10)
                if classes[after] != 2 and after != 46:
                    j += 1
            token_end, token_kind = j, NUMBER
        elif unclosed < MAX_UNCLOSED:
            if c == 34 or c == 39 or c == 96:
                mode = rules[DOUBLE if c == 34 else (SINGLE if c == 39 else BACKTICK)]
                closes_operand = adjacent and (is_operand or previous == 46 or previous == 39)
                if mode == 0 or (mode & TRANSPOSE and closes_operand):
                    pass
                elif literals & TRIPLE and following == c and i + 2 < end and data[i + 2] == c and c != 96:
                    k = end_of_triple_quotes(data, i + 3, end, c)
                elif literals & RAW_TRIPLE and c == 34 and following == 34 and i + 2 < end and data[i + 2] == 34:
                    k = end_of_raw_triple_quotes(data, i + 3, end)
                elif literals & RAW_TRIPLE and c == 34 and not (adjacent and last_kind == WORD):  # not s"${a}"
                    k = end_of_delimited(data, i + 1, end, c, True, False)
                elif mode & CHARACTER:
                    k = max(0, end_of_character(data, i + 1, end))
                elif c == 34 and literals & VERBATIM and previous == 64:
                    k = end_of_verbatim(data, i + 1, end)
                else:
                    k = end_of_string(data, i + 1, end, c, rules)
            elif c == 91 and literals & LONG_BRACKET and (following == 91 or following == 61):
                k = max(0, end_of_long_bracket(data, i, end))
            elif c == 123 and literals & BAR_BRACES and (following == 124 or 97 <= following <= 122):
                k = max(0, end_of_bar_braces(data, i, end))
            elif c == 60 and following == 60 and literals & (SHELL_HEREDOC | RUBY_HEREDOC | PHP_TEXT):
                j = i + 2
                may = True
                if literals & PHP_TEXT:
                    may = j < end and data[j] == 60
                    j += 1
                    while j < end and data[j] == 32:
                        j += 1
                elif literals & RUBY_HEREDOC:
                    may = not is_operand or (not adjacent and j < end and data[j] != 32)
                    may = may and j < end and (data[j] in (45, 126, 34, 39, 96) or 65 <= data[j] <= 90)
                elif j < end and data[j] == 60:  # <<<
                    may = False
                    token_end = j + 1
                else:
                    while j < end and data[j] == 32:
                        j += 1
                if may and num_tags < MAX_HEREDOCS:
                    tag, tag_end, after_tag = heredoc_tag(data, j, end)
                    if tag > 0:
                        tags[num_tags, 0], tags[num_tags, 1] = tag, tag_end
                        num_tags += 1
                        k = after_tag
            elif c == 47 and literals & SLASH_REGEX:
                may = not is_operand
                if not may and literals & REGEX_AFTER_BLANK and last_kind == WORD:
                    may = previous == 32 and following != 32 and following != 61
                if may:
                    k = max(0, end_of_regex(data, i + 1, end))
                if k == 0 and not is_operand and literals & MULTILINE_REGEX:
                    k = end_of_delimited(data, i + 1, end, c, False, True)
                    while 0 < k < end and is_letter(data[k]):
                        k += 1
            elif c == 37 and literals & RUBY_PERCENT:
                may = not is_operand or (last_kind == WORD and previous == 32 and following != 32 and following != 61)
                j = i + 1
                if j < end and is_letter(data[j]):
                    j += 1
                if may and j < end and data[j] in (40, 91, 123, 60, 124, 33, 47):
                    k = max(0, end_of_delimited(data, j + 1, end, data[j], False, False))
            elif c == 37 and literals & R_RAW:  # %in%
                j = i + 1
                while j < end and data[j] != 37 and data[j] > 32:
                    j += 1
                if j < end and data[j] == 37:
                    token_end = j + 1
            elif c == 126 and literals & SIGILS and is_letter(following):
                j = i + 2
                while j < end and 65 <= data[j] <= 90:
                    j += 1
                if j + 2 < end and (data[j] == 34 or data[j] == 39) and data[j + 1] == data[j] == data[j + 2]:
                    k = end_of_triple_quotes(data, j + 3, end, data[j])
                elif j < end and data[j] in (34, 39, 47, 124, 40, 91, 123, 60):
                    is_raw = 65 <= following <= 90
                    k = max(0, end_of_delimited(data, j + 1, end, data[j], False, not is_raw))
                while 0 < k < end and is_letter(data[k]):
                    k += 1
            elif c == 64 and literals & HERE_STRING and (following == 34 or following == 39):
                j = i + 2
                k = -1
                while j + 2 < end:
                    if data[j] == 10 and data[j + 1] == following and data[j + 2] == 64:
                        k = j + 3
                        break
                    j += 1
            elif c == 92 and literals & SHELL_EXPANSION:  # \' is no quote
                token_end = i + 2
            elif c == 92 and literals & LINE_STRINGS and following == 92:
                k = end_of_line(data, i, end)
            elif c == 92 and literals & BACKSLASH_CHARACTER and following > 32:
                k = i + 2
                while k < end and (is_letter(data[k]) or 48 <= data[k] <= 57) and is_letter(following):
                    k += 1
            elif c == 63 and literals & QUESTION_CHARACTER and not is_operand and following > 32:
                j = i + 2 + (following == 92)
                if j >= end or not is_letter(data[j]):
                    k = min(j, end)
            elif c == 46 and literals & AMPERSAND and is_letter(following):  # .and.
                j = i + 1
                while j < end and is_letter(data[j]):
                    j += 1
                if j < end and data[j] == 46:
                    token_end = j + 1
            elif c == 63 and following == 62 and literals & PHP_TEXT:  # ?> text <?
                j = i + 2
                while j < end and not (data[j] == 60 and j + 1 < end and data[j + 1] == 63):
                    j += 1
                k = j
            if k > 0:
                token_end, token_kind = k, STRING
        if k < 0:
            unclosed += 1
        if token_kind == PUNCTUATION and (kind == 0 or kind == INSIDE) and token_end == i + 1:
            if flags & SYMBOL_RUNS and c not in (40, 41, 91, 93, 123, 125, 44, 59, 96, 34, 39):
                j = i + 1
                while (
                    j < end and classes[data[j]] == 0 and data[j] not in (40, 41, 91, 93, 123, 125, 44, 59, 96, 34, 39)
                ):
                    j += 1
                token_end = j
            elif flags & OWN_OPERATORS and c in OPERATOR_STARTS and previous != 91 and previous != 123:
                while token_end < end and is_symbol(data[token_end]) and data[token_end] not in (35, 92):
                    token_end += 1
            elif flags & INFIX_METHODS:
                while is_operator_character(c) and token_end < end and is_operator_character(data[token_end]):
                    if data[token_end] == 47 and token_end + 1 < end and data[token_end + 1] in (42, 47):
                        break  # a comment
                    token_end += 1
            elif bytes_of[c] & OPERATOR_START and (classes[following] == 0 or classes[following] == INSIDE):
                for size in range(MAX_OPERATOR, 1, -1):
                    if i + size <= end and row_of(known, hash_bytes(data, i, i + size)) != NO_ROLE:
                        token_end = i + size
                        break
        token_end = min(token_end, end)
        if (flags & CASELESS and token_kind == WORD and token_end - i < 64) or (
            token_kind == PUNCTUATION and literals & AMPERSAND and token_end - i < 64
        ):
            h = hash_lower(data, i, token_end, lower)
        else:
            h = hash_bytes(data, i, token_end)
        role = row_of(known, h) if token_kind in (WORD, PUNCTUATION) else NO_ROLE
        if flags & INFIX_METHODS and token_kind == PUNCTUATION and role == NO_ROLE:
            role = infix_operator(data, i, token_end, known)
        row = role
        is_member = previous == 46 or previous == 64 or (previous == 58 and (i < begin + 2 or data[i - 2] == 58))
        if token_kind == WORD and adjacent and is_member:
            role = NO_ROLE  # a.then
        bits = roles[role, BITS] if role != NO_ROLE else 0
        if flags & INFIX_METHODS and pending and count > 0:
            if depth == case_depth:
                bits |= LEADING
            elif token_kind == PUNCTUATION and c == 123:  # a block after one line end belongs to the line before
                bits |= LEADING if line_breaks(data, ends[count - 1], i) == 1 else 0
            elif token_kind == PUNCTUATION and role != NO_ROLE and token_end < end and data[token_end] <= 32:
                is_prefix = roles[role, UNARY_LEVEL] > 0 and token_end == i + 1
                bits |= LEADING if roles[role, BINARY] > 0 and not is_prefix else 0
        if flags & DIRECTIVES and c == 96 and begins_line(data, i, begin):
            in_directive = True
            pending = pending or count > 0
        # --- the line end before it --------------------------------------------------------------------------------
        if flags & OFFSIDE and (pending or count == 0):
            column = 0
            for j in range(line_begin, i):
                column = (column // 8 + 1) * 8 if data[j] == 9 else column + 1
            if pending:
                hashes[count], kinds[count], starts[count], ends[count] = NEWLINE, LAYOUT, i, i
                count += 1
            if column > indents[indent_level]:
                if indent_level < MAX_INDENTS - 1:
                    indent_level += 1
                    indents[indent_level] = column
                    hashes[count], kinds[count], starts[count], ends[count] = INDENT, LAYOUT, i, i
                    count += 1
            else:
                while indent_level > 0 and column < indents[indent_level]:
                    indent_level -= 1
                    hashes[count], kinds[count], starts[count], ends[count] = DEDENT, LAYOUT, i, i
                    count += 1
        elif pending and count > 0:
            last_bits = roles[last_role, BITS] if last_role != NO_ROLE else 0
            continues = last_role != NO_ROLE and (
                roles[last_role, BINARY] > 0 or last_bits & (OPENS | ASSIGNMENT | ACCESSOR) != 0
            )
            if flags & BIT_STRINGS and last_kind == PUNCTUATION and data[starts[count - 1]] == 62:
                continues = continues and ends[count - 1] - starts[count - 1] != 2  # <<a>>
            if last_kind == PUNCTUATION and not continues:
                b = data[ends[count - 1] - 1]
                continues = b == 44 or b == 40 or b == 91 or b == 123
                if continues and not flags & ENDS:
                    continues = False
            is_closing = token_kind == PUNCTUATION and (c == 41 or c == 93 or c == 125) and not in_directive
            if not (continues or is_closing or bits & (CLOSES | LEADING)) and kinds[count - 1] != LAYOUT:
                hashes[count], kinds[count], starts[count], ends[count] = NEWLINE, LAYOUT, i, i
                count += 1
        pending = False
        after_head = False
        # --- brackets ----------------------------------------------------------------------------------------------
        if token_kind == PUNCTUATION:
            if c == 40 or c == 91 or c == 123:
                depth = min(depth + 1, MAX_BRACKETS)
                brackets[depth] = c
                has_block[depth] = False
                is_head[depth] = last_role != NO_ROLE and roles[last_role, BITS] & HEAD != 0
            elif (c == 41 or c == 93 or c == 125) and depth > 0:
                if closing_of(brackets[depth]) == c:
                    after_head = is_head[depth]
                    depth -= 1
            elif c == 59 and token_end == i + 1 and flags & SEMICOLON_ENDS and (depth == 0 or brackets[depth] == 123):
                pending = True
                i = token_end
                continue
        elif bits & NEWLINE_WORD:
            pending = True
            i = token_end
            continue
        if flags & INFIX_METHODS:
            if h == CASE and token_kind == WORD:
                case_depth = depth
            elif depth < case_depth or h == ARROW or (bits & KEYWORD and not bits & HEAD):
                case_depth = -1
        if bits & BLOCK_WORD:
            has_block[depth] = True
        hashes[count], kinds[count], starts[count], ends[count], rows[count] = h, token_kind, i, token_end, row
        count += 1
        stats[3] += token_end - i
        if token_kind == STRING:
            stats[1] += token_end - i
        elif token_kind == NUMBER:
            stats[2] += token_end - i
        last_role = role
        i = token_end
    while indent_level > 0:
        indent_level -= 1
        hashes[count], kinds[count], starts[count], ends[count] = DEDENT, LAYOUT, end, end
        count += 1
    return count
