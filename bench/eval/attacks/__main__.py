"""python -m bench.eval.attacks LANGUAGE BACKEND SCRIPT...: attack from this process; prints JSON. Standard library
only."""

import json
import sys

from bench.eval.attacks.suite import run_attacks

language, backend, *scripts = sys.argv[1:]
print(json.dumps(run_attacks(language, backend, scripts)))
