"""The command `lakh`: parse, call, print. One short file per command, loaded when it is asked for.

Results go to stdout, talk and progress bars to stderr; with `--json` the last line of stdout is one JSON document.
Exit codes: 0 done, 2 the user's input, 65 damaged data, 75 try again, 1 our bug.
"""

from lakh.cli.main import main

__all__ = ["main"]
