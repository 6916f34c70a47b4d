"""Secret-like strings are made here at run time, never written down: hosts that scan repositories would object."""

from __future__ import annotations

import json
import random
import string
import time

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.document import complete
from lakh.corpus.secrets import SecretSettings, redacted, redaction, scanner_of
from lakh.corpus.secrets.placeholders import placeholder
from lakh.corpus.secrets.rules import rule_tables, rules
from lakh.corpus.secrets.scan import has_hyperscan
from lakh.corpus.secrets.shapes import PIECE, regex_of
from lakh.errors import ConfigError

ALPHABET = {
    "x": "0123456789abcdef",
    "d": string.digits,
    "u": string.ascii_uppercase + string.digits,
    "l": string.ascii_letters,
}
NO_PII = SecretSettings(pii=())


def draw(shape: str, rng: random.Random) -> str:
    """A random text of a shape."""
    made = []
    for found in PIECE.finditer(shape.removeprefix("~")):
        alphabet, low, high, choice, option, plain = found.groups()
        if found.group() == "<uuid>":
            made.append("-".join("".join(rng.choices("0123456789abcdef", k=n)) for n in (8, 4, 4, 4, 12)))
        elif alphabet:
            size = int(low)
            if high is not None:
                size += rng.randint(0, min(int(high) - size, 3)) if high else 8
            made.append("".join(rng.choices(ALPHABET.get(alphabet, string.ascii_letters + string.digits), k=size)))
        elif choice:
            made.append(draw(rng.choice(choice.split("|")), rng))
        elif option:
            continue
        else:
            made.append(plain)
    return "".join(made)


def table(name: str) -> list[tuple[str, str]]:
    return [(key, shape) for key, shapes in rule_tables()[name].items() for shape in shapes]


@pytest.mark.parametrize(("kind", "shape"), table("tokens"))
def test_token_is_found_anywhere_in_a_text(kind: str, shape: str) -> None:
    rng = random.Random(shape)
    found = 0
    for _ in range(20):
        secret = draw(shape, rng)
        data = f'import os\nvalue = fetch("{secret}")\n'.encode()
        spans = [data[f.begin : f.end].decode() for f in scanner_of(NO_PII).find(data)]
        found += secret in spans
    assert found >= 19  # one draw in some hundreds has too little entropy or spells a placeholder


@pytest.mark.parametrize(("words", "shape"), table("named"))
def test_random_value_after_the_name_of_its_service_is_found(words: str, shape: str) -> None:
    rng = random.Random(shape)
    found = 0
    for _ in range(20):
        secret = draw(shape, rng)
        data = f'config["{words.split()[0].upper()}_ACCESS"] = "{secret}"\n'.encode()
        found += any(data[f.begin : f.end].decode() == secret for f in scanner_of(NO_PII).find(data))
    assert found >= 16  # of 14 random letters and digits none is a digit once in twelve times


CLEAN = [
    'api_key = os.environ["API_KEY"]',
    'token = "YOUR_TOKEN_HERE"',
    'password = "<password>"',
    'password = "${DB_PASSWORD}"',
    'secret = "xxxxxxxxxxxxxxxxxxxxxxxx"',
    'key = "user.profile.display_name"',
    "cache_key = some_module.compute_key_v2(argument)",
    'access_token = "example-token-1234"',
    'commit = "da39a3ee5e6b4b0d3255bfef95601890afd80709"',
    'sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"',
    "linear = nn.Linear(in_features, out_features)",
    'auth_url = "https://auth.example.com/v2/token"',
    'api_version = "2023-10-01-preview"',
    "token_type_ids = inputs.token_type_ids[0]",
    'KEY_PATH = "/etc/ssl/private/server1.key"',
]


@pytest.mark.parametrize("line", CLEAN)
def test_hand_written_values_are_not_secrets(line: str) -> None:
    assert scanner_of(NO_PII).find(line.encode()) == []


def random_text(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=size))


def test_key_blocks_headers_urls_and_generic_assignments_are_found() -> None:
    rng = random.Random(3)
    body = "\n".join(random_text(rng, 64) for _ in range(8))
    secret = random_text(rng, 32)
    texts = {
        "private-key": f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----",
        "authorization-header": f'headers = {{"Authorization": "Bearer {secret}"}}',
        "url-password": f"postgres://app:{secret}@db.acme.io:5432/app",
        "generic-credential": f'client_secret: "{secret}"',
        "password": 'db_password = "hunter2-Blue9"',
        "curl-user": f"curl -s -u admin:{secret} https://acme.io",
    }
    for kind, text in texts.items():
        assert [f.kind for f in scanner_of(NO_PII).find(text.encode())] == [kind], text


def test_hyperscan_and_hints_give_the_same_findings() -> None:
    if not has_hyperscan():
        pytest.skip("hyperscan is not installed: pip install hyperscan")
    rng = random.Random(9)
    lines = [f"x = '{draw(shape, rng)}'" for _, shape in table("tokens")] + CLEAN
    lines += [f"{words.split()[0]}_key: {draw(shape, rng)}" for words, shape in table("named")]
    lines += [f"mail j.doe{i}@acme.io from 83.12.4.{i}" for i in range(1, 9)]
    for start in range(0, len(lines), 7):
        data = "\n".join(lines[start : start + 7]).encode()
        one = scanner_of(SecretSettings(engine="hyperscan")).find(data)
        assert one == scanner_of(SecretSettings(engine="hints")).find(data)


@given(st.text(max_size=300))
def test_any_text_can_be_scanned_and_redaction_leaves_nothing_to_find(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    scanner = scanner_of(SecretSettings())
    assert scanner.find(redacted(data, scanner.find(data))) == []


def test_redaction_keeps_length_and_punctuation_and_is_idempotent() -> None:
    rng = random.Random(1)
    scanner = scanner_of(NO_PII)
    for kind, shape in table("tokens"):
        data = f"x = '{draw(shape, rng)}'".encode()
        after = redacted(data, scanner.find(data))
        assert len(after) == len(data), kind
        assert [c for c in after.decode() if not c.isalnum()] == [c for c in data.decode() if not c.isalnum()]
        assert scanner.find(after) == [], (kind, after)


def test_placeholder_names_its_kind_and_keeps_the_prefix_of_the_token() -> None:
    made = placeholder("github-token", "ghp_" + "a1" * 18)
    assert made.startswith("ghp_REDACTEDGITHUBTOKEN")
    assert placeholder("discord-credential", "123456789012345678") == "0" * 18


PII = [
    ("email", "jane.doe@acme.io", True),
    ("email", "git@github.com", False),
    ("email", "user@example.com", False),
    ("email", "icon@2x.png", False),
    ("ipv4", "83.12.4.7", True),
    ("ipv4", "192.168.1.10", False),
    ("ipv4", "127.0.0.1", False),
    ("ipv4", "1.2.3.4", False),
    ("ipv4", "8.8.8.8", False),
    ("phone", "+49 30 901820 11", True),
    ("phone", "(415) 555-0199", False),
]


@pytest.mark.parametrize(("kind", "value", "is_someones"), PII)
def test_personal_data_is_found_and_reserved_names_are_kept(kind: str, value: str, is_someones: bool) -> None:
    found = scanner_of(SecretSettings(pii=("email", "ipv4", "ipv6", "phone"))).find(
        f"# see {value} for more\n".encode()
    )
    assert [f.kind for f in found] == ([kind] if is_someones else [])


def test_hosts_and_employee_numbers_come_from_the_settings() -> None:
    settings = SecretSettings(pii=(), internal_hosts=(".corp.acme.com",), employee_ids=(r"\bE[0-9]{6}\b",))
    found = scanner_of(settings).find(b"ask E123456 at git.build.corp.acme.com or git.acme.com\n")
    assert [(f.kind, f.value) for f in found] == [("employee-id", "E123456"), ("host", "git.build.corp.acme.com")]


def test_invalid_settings_raise_an_error_with_their_name() -> None:
    with pytest.raises(ConfigError, match=r"pii: 'emial'"):
        SecretSettings(pii=("emial",))
    with pytest.raises(ConfigError, match=r"employee_ids: the pattern"):
        SecretSettings(employee_ids=(r"(?<=x)y",))


def batch_of(texts: list[str]) -> pa.RecordBatch:
    return complete(
        pa.record_batch({"id": [str(i) for i in range(len(texts))], "text": texts, "sha256": ["h"] * len(texts)})
    )


def test_filter_redacts_counts_and_rehashes_or_drops() -> None:
    secret = "ghp_" + random_text(random.Random(2), 36)
    batch = batch_of([f"x = '{secret}'\n", "y = 1\n"])
    rows = redaction(NO_PII)(batch).to_pylist()
    assert secret not in rows[0]["text"]
    assert json.loads(rows[0]["secrets"]) == {"github-token": 1}
    assert rows[0]["sha256"] != "h"
    assert (rows[1]["text"], rows[1]["secrets"], rows[1]["sha256"]) == ("y = 1\n", "", "h")
    rows = redaction(SecretSettings(action="drop"))(batch).to_pylist()
    assert [(row["reason"], row["detail"]) for row in rows] == [("secret", "1 github-token"), ("", "")]
    assert redaction(SecretSettings(action="keep"))(batch) is batch


def test_hostile_texts_do_not_slow_the_patterns() -> None:
    begin = time.process_time()
    for piece in ("curl ", "kind: secret data: ", "password=", "ey", "key=key=", "a@a.", "-----BEGIN PRIVATE KEY"):
        scanner_of(SecretSettings()).find((piece * (200_000 // len(piece))).encode())
    assert time.process_time() - begin < 120  # seconds where a backtracking engine takes years


def test_every_rule_compiles_and_has_hints() -> None:
    assert len({rule.kind for rule in rules()}) > 80
    assert all(rule.hints and all(rule.hints) for rule in rules())
    assert regex_of("a.<x2>{b|c}[-<d1>]") == r"a\.[0-9a-fA-F]{2}(?:b|c)(?:\-[0-9]{1})?"
