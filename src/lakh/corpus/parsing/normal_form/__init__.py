"""The normal form of a program: its syntax tokens without what a formatter may change.

    redundant_tokens.py   finds the tokens that mean nothing: redundant parentheses (by the precedence of the operators
                          in and around them), trailing commas, the semicolons of JavaScript
    writer.py             writes the others: strings without their quotes and needless escapes, Python's strings and
                          numbers by their value, docstrings with every run of blanks as one, `elif` as `else` and `if`

Two programs with the same syntax tree have the same normal form, in Python and the C-like languages. It is made from
tokens, since a parse costs ten times as much. The other languages are in table_driven/.
"""
