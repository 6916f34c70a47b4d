"""Make src/lakh/corpus/secrets/gitleaks.toml from config/gitleaks.toml of a gitleaks checkout.

    python scripts/gitleaks_rules.py CHECKOUT/config/gitleaks.toml COMMIT > src/lakh/corpus/secrets/gitleaks.toml

Kept as they are: id, regex, secretGroup, entropy, keywords, and the allowlists that look at the secret or the match.
Left out: descriptions, allowlists by path or line or with whole example keys, the rule without a regular expression
(pkcs12-file) and generic-api-key, for which lakh has rules of its own.
"""

import sys
import tomllib
from pathlib import Path

HEADER = """# Rules of gitleaks (https://github.com/gitleaks/gitleaks, config/gitleaks.toml, commit {commit}).
# MIT License, Copyright (c) 2019 Zachary Rice; the whole notice is in NOTICE.
# Made by scripts/gitleaks_rules.py, which says what is left out. Do not edit: lakh's own rules are in rules.toml.
"""
LEFT_OUT = ("generic-api-key", "pkcs12-file")


def literal(text: str) -> str:
    return f"'''{text}'''"


def patterns(allowlists: list[dict[str, object]], target: str) -> list[str]:
    found: list[str] = []
    for entry in allowlists:
        if "paths" in entry or entry.get("regexTarget", "secret") != target:
            continue
        found += [text for text in entry.get("regexes", []) if not text.startswith("AIza")]  # type: ignore[attr-defined]
    return found


def main(path: str, commit: str) -> None:
    config = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    lines = [HEADER.format(commit=commit)]
    lines.append("allowed = [" + ", ".join(map(literal, config["allowlist"]["regexes"])) + "]")
    lines.append(f"stopwords = {config['allowlist']['stopwords']}")
    for rule in config["rules"]:
        if rule["id"] in LEFT_OUT:
            continue
        lines += ["", "[[rules]]", f'id = "{rule["id"]}"', f"regex = {literal(rule['regex'])}"]
        lines.append("keywords = " + str(rule["keywords"]).replace("'", '"'))
        for name in ("entropy", "secretGroup"):
            if name in rule:
                lines.append(f"{name} = {rule[name]}")
        for name, target in (("allowed", "secret"), ("allowed_match", "match")):
            if texts := patterns(rule.get("allowlists", []), target):
                lines.append(f"{name} = [" + ", ".join(map(literal, texts)) + "]")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
