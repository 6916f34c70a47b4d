"""The normal form of languages whose syntax is a table of syntax.toml: comments, quotes, operators, line ends.

    syntax.toml   the table: one section per language
    syntax.py     the table as arrays
    comments.py   where comments end
    characters.py small tests of bytes
    roles.py      the role of a token in the table, by name or by its characters
    literals.py   where strings end: escapes, interpolations, here-documents, quote operators
    lexer.py      tokens without comments; a line end is a token where the language ends a statement there
    groups.py     redundant parentheses, by the operators of the table, and trailing commas
    writer.py     the tokens by their value

A rule that is not safe in a language is not in its section: two different programs never get one normal form, and the
same program in another layout may get two.
"""
