"""Context from the rest of a repository for a completion: what imported names look like, and similar code nearby.

    identifiers.py   the names in a text, and how much two texts share
    definitions.py   a file's definitions as outlines: signatures, fields, methods
    imports.py       what a file imports
    repository.py    the files of a repository: reads them, resolves imports to them
    snippets.py      chooses the outlines that a prompt should have, within a budget

Used by `lakh lsp` (files on disk and open files) and by the service (files that a request sends). Languages differ in
their import statements only: definitions are found by keywords and indentation, so files that do not parse work too.
Independent of torch.
"""
