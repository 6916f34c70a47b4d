"""The command `lakh`: parse, call, print. One short file per command, imported on first use.

Results go to stdout, messages and progress bars to stderr; with `--json` the last line of stdout is one JSON document.
Exit codes: 0 success, 2 invalid input, 65 damaged data, 75 try again, 1 a bug in lakh.
"""

from lakh.cli.main import main

__all__ = ["main"]
