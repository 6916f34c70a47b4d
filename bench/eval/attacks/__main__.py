"""python -m bench.eval.attacks LANGUAGE BACKEND: attack from this process; prints JSON. Standard library only."""

import json
import sys

from bench.eval.attacks.suite import run_attacks

print(json.dumps(run_attacks(*sys.argv[1:])))
