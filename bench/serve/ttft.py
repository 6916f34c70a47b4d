"""Time to first token of a running server, one request at a time: a new prompt (cold), then the same prompt with a few
more characters (warm), as in typing. Prompts are 1,500 characters of the standard library's source.

    python -m bench.serve.ttft URL [TIMES] [--json]

A random model's tokenizer has no merges: a character is a token. Prints percentiles in milliseconds.
"""

import argparse
import http.client
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

CHARS, TYPED = 1500, 6


def ask(link: http.client.HTTPConnection, prompt: str) -> float:
    """Milliseconds until the first streamed chunk."""
    body = json.dumps({"prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": True})
    began_s = time.perf_counter()
    link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = link.getresponse()
    response.readline()
    first_ms = (time.perf_counter() - began_s) * 1e3
    response.read()
    return first_ms


def percentiles(values: list[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {f"p{q}": round(ranked[min(len(ranked) * q // 100, len(ranked) - 1)], 2) for q in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("times", type=int, nargs="?", default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = Path(argparse.__file__).read_text(encoding="utf-8") + Path(http.client.__file__).read_text(encoding="utf-8")
    link = http.client.HTTPConnection(urlsplit(options.url).netloc, timeout=60)
    cold, warm = [], []
    for number in range(options.times):
        start = number * 631 % (len(text) - CHARS - TYPED)
        cold.append(ask(link, text[start : start + CHARS]))
        warm.append(ask(link, text[start : start + CHARS + TYPED]))
    found: dict[str, object] = {
        "cold_ms": percentiles(cold[2:]),
        "warm_ms": percentiles(warm[2:]),
        "times": options.times,
    }
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in (("cold", found["cold_ms"]), ("warm", found["warm_ms"])):
        print(f"first token, ms, {name}: {figures} ({options.times} requests)")


if __name__ == "__main__":
    main()
