"""Secret-like strings are made here at run time, never written down: hosts that scan repositories would object."""

from __future__ import annotations

import base64
import json
import random
import re
import string
import time

import pyarrow as pa
import pytest
from bench.corpus.planted import random_match
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.document import complete
from lakh.corpus.filters.syntax import parser_of
from lakh.corpus.parsing.languages import LANGUAGES
from lakh.corpus.parsing.lexer import STRING
from lakh.corpus.parsing.text_features import tokens_of
from lakh.corpus.secrets import SecretSettings, find_secrets, redacted, redaction, scanner_of
from lakh.corpus.secrets.placeholders import placeholder
from lakh.corpus.secrets.randomness import surprise_bits
from lakh.corpus.secrets.rules import SecretRule, rule_tables, rules
from lakh.corpus.secrets.scan import has_hyperscan
from lakh.errors import ConfigError

NO_PII = SecretSettings(pii=())
# Drawn at random these are placeholders of their own, or need more around them than a line.
NOT_DRAWN = {
    "basic-authorization",
    "kubernetes-secret-yaml",
    "curl-auth-user",
    "generic-credential",
    "json-credential",
    "password",
    "markup-credential",
}


def drawn(rule: SecretRule, rng: random.Random) -> str:
    """A line that a rule describes, then the words of which it asks for one."""
    return f"{random_match(rule.pattern, rng)}\n{' '.join(rule.hints)}\n"


@pytest.mark.parametrize("rule", [rule for rule in rules() if rule.kind not in NOT_DRAWN], ids=lambda rule: rule.kind)
def test_every_rule_finds_what_it_describes(rule: SecretRule) -> None:
    rng = random.Random(rule.kind)
    # a draw may have too little entropy or spell a placeholder
    assert any(scanner_of(NO_PII).find(drawn(rule, rng).encode()) for _ in range(20))


def test_every_own_rule_names_its_source_and_the_rules_of_gitleaks_their_licence() -> None:
    tables = rule_tables()
    assert all(entry["source"] for table in ("special", "generic") for entry in tables[table])
    ids = {rule.kind for rule in rules()}
    assert set(tables["gitleaks_quick"]) <= ids
    assert len(ids) > 200


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
    r'"api_body": "{\"name\": \"the name of the owner\", \"page\": \"first page of results\"}"',
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
        "bearer-token": f'headers = {{"Authorization": "Bearer {secret}"}}',
        "basic-authorization": "Authorization: Basic " + base64.b64encode(f"ann:{secret}".encode()).decode(),
        "url-password": f"postgres://app:{secret}@db.acme.io:5432/app",
        "generic-credential": f'client_secret: "{secret}"',
        "password": 'db_password = "hunter2-Blue9"',
        "curl-auth-user": f"curl -s -u admin:{secret} https://acme.io",
        "markup-credential": f"<privateKeyPassword>{secret}</privateKeyPassword>",
        "connection-password": f"Server=db;User Id=app;Password={secret};",
        "json-credential": f'"Apitoken": "{{\\"name\\":\\"ann\\",\\"sig\\":\\"{secret}\\"}}",',
        "aws-credential-scope": f"?X-Amz-Credential=AKIA{secret[:16].upper()}%2F20240131%2Feu-west-1%2Fs3",
        "aws-key-pair": f"creds = 'AKIA{secret[:16].upper()}:{random_text(rng, 40)}'",
    }
    for kind, text in texts.items():
        assert [f.kind for f in scanner_of(NO_PII).find(text.encode())] == [kind], text


def test_hyperscan_and_hints_give_the_same_findings() -> None:
    if not has_hyperscan():
        pytest.skip("hyperscan is not installed: pip install hyperscan")
    rng = random.Random(9)
    lines = [line for rule in rules() for line in drawn(rule, rng).split("\n")] + CLEAN
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
    for rule in rules():
        data = f"x = '{random_match(rule.pattern, rng)}'".encode()
        after = redacted(data, find_secrets(data, NO_PII))
        assert len(after) == len(data), rule.kind
        assert [c for c in after.decode() if not c.isalnum()] == [c for c in data.decode() if not c.isalnum()]
        assert find_secrets(after, NO_PII) == [], (rule.kind, after)


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
    assert json.loads(rows[0]["secrets"]) == {"github-pat": 1}
    assert rows[0]["sha256"] != "h"
    assert (rows[1]["text"], rows[1]["secrets"], rows[1]["sha256"]) == ("y = 1\n", "", "h")
    rows = redaction(SecretSettings(action="drop"))(batch).to_pylist()
    assert [(row["reason"], row["detail"]) for row in rows] == [("secret", "1 github-pat"), ("", "")]
    assert redaction(SecretSettings(action="keep"))(batch) is batch


def test_hostile_texts_do_not_slow_the_patterns() -> None:
    begin = time.process_time()
    for piece in ("curl ", "kind: secret data: ", "password=", "ey", "key=key=", "a@a.", "-----BEGIN PRIVATE KEY"):
        scanner_of(SecretSettings()).find((piece * (200_000 // len(piece))).encode())
    assert time.process_time() - begin < 120  # seconds where a backtracking engine takes years


def test_every_rule_compiles_and_has_hints() -> None:
    assert all(rule.hints and all(rule.hints) for rule in rules())
    assert len(scanner_of(NO_PII).rules) == len(rules())


def test_random_characters_surprise_and_identifiers_do_not() -> None:
    rng = random.Random(5)
    written = [
        "sendAccountSubsToGateway",
        "x509PrivateKeyRSA2048",
        "user.profile.display_name",
        "AWS_SECRET_ACCESS_KEY",
    ]
    assert max(map(surprise_bits, written)) < 5.5 < 6.0 < min(surprise_bits(random_text(rng, 24)) for _ in range(50))


# --- what a redaction may change --------------------------------------------------------------------------------------

IDENTIFIERS = {
    "go": "package p\n\nfunc f() { s.sendAccountSubsToGateway(c, accName); key = x509PrivateKeyRSA2048 }\n",
    "python": "token = s.a1b2C3d4E5f6G7h8I9j0K1l2\nsecret_key = x9Kd82LmQ0rTzW51\n",
    "java": "class A { String apiKey = k8Fh2LmQ9dTzW51xR.toString(); }\n",
    "rust": "fn main() { let token = x8KdR2vQbWz5TnLpYcJ3; }\n",
    "kotlin": "val token = x8KdR2vQbWz5TnLpYcJ3Hg7M()\n",
}


@pytest.mark.parametrize("language", IDENTIFIERS)
def test_identifiers_are_never_redacted(language: str) -> None:
    assert find_secrets(IDENTIFIERS[language].encode(), NO_PII, language) == []


def programs(secret: str, key: str) -> dict[str, str]:
    """A secret in a string; a key block beside escapes, an interpolation or a concatenation."""
    begin, end = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
    one, two = key[:90], key[90:]
    block = f"{begin}\\n{key}\\n{end}"
    return {
        "python": f'token = f"{secret}"  # token: {secret}\n'
        f'PEM = ("{begin}\\n"\n  "{one}\\n" + name(\n  "{two}\\n{end}"))\n',
        "go": f'package p\n\nvar apiToken = "{secret}"\n'
        f'var pem = "{begin}\\n" +\n\t"{one}\\n" + name + "{two}\\n{end}"\n',
        "java": f'class A {{ String token = "{secret}"; String pem = "{begin}\\n" + "{key}\\u000a" + "{end}"; }}\n',
        "rust": f'const TOKEN: &str = "{secret}";\nconst PEM: &str = "{block}";\n',
        "c": f'#define TOKEN "{secret}"\nchar *token = "{secret}";\nchar *pem = "{begin}\\n"\n  "{key}\\n{end}";\n',
        "javascript": f"const token = '{secret}'; const pem = `{begin}\n{one}${{name}}\n{two}\n{end}`;\n",
        "typescript": f'const apiKey: string = "{secret}";\nconst pem = "{block}";\n',
        "cpp": f'std::string token("{secret}");\nauto pem = R"({begin}\n{key}\n{end})";\n',
    }


LANGUAGES_WITH_GRAMMAR = sorted(programs("", ""))


@pytest.mark.parametrize("language", LANGUAGES_WITH_GRAMMAR)
def test_redacted_programs_parse_as_before(language: str) -> None:
    rng = random.Random(language)
    secret, key = random_text(rng, 32), random_text(rng, 180)
    data = programs(secret, key)[language].encode()
    after = redacted(data, find_secrets(data, NO_PII, language))
    assert secret.encode() not in after
    assert key[:80].encode() not in after
    assert key[-80:].encode() not in after
    assert syntax(after, language) == syntax(data, language)


def syntax(data: bytes, language: str) -> list[str]:
    """The kinds of nodes, and the text of everything that is neither a string nor a comment."""
    seen, waiting = [], [parser_of(language).parse(data).root_node]
    while waiting:
        node = waiting.pop()
        seen.append(node.type)
        if "identifier" in node.type or "escape" in node.type:
            seen.append(node.text.decode())
        waiting += node.children
    assert "ERROR" not in seen
    return seen


# language: a comment, a string, and a name in the place of that string
OTHER_PROGRAMS = {
    "bash": ("# {}", 'api_token="{}"', "api_token=$({})"),
    "clojure": ("; {}", '(def api-token "{}")', "(def api-token {})"),
    "cmake": ("# {}", 'set(api_token "{}")', "{}(api_token)"),
    "csharp": ("// {}", 'var apiToken = "{}";', "var apiToken = {};"),
    "css": ("/* {} */", '.a::after {{ content: "{}" }}', ".{} {{ color: red }}"),
    "cuda": ("// {}", 'const char *api_token = "{}";', "auto api_token = {};"),
    "dart": ("// {}", "var apiToken = '{}';", "var apiToken = {};"),
    "elixir": ("# {}", 'api_token = "{}"', "api_token = {}"),
    "erlang": ("% {}", 'ApiToken = "{}".', "ApiToken = {}."),
    "fortran": ("! {}", "api_token = '{}'", "api_token = {}"),
    "fsharp": ("// {}", 'let apiToken = "{}"', "let apiToken = {}"),
    "groovy": ("// {}", "def apiToken = '{}'", "def apiToken = {}"),
    "haskell": ("-- {}", 'apiToken = "{}"', "apiToken = {}"),
    "julia": ("# {}", 'api_token = "{}"', "api_token = {}"),
    "kotlin": ("// {}", 'val apiToken = "{}"', "val apiToken = {}"),
    "lua": ("-- {}", "local api_token = '{}'", "local api_token = {}"),
    "matlab": ("% {}", "api_token = '{}';", "api_token = {};"),
    "ocaml": ("(* {} *)", 'let api_token = "{}"', "let api_token = {}"),
    "perl": ("# {}", "my $api_token = '{}';", "my $api_token = {};"),
    "php": ("<?php // {}", "$api_token = '{}';", "$api_token = {};"),
    "powershell": ("# {}", "$ApiToken = '{}'", "$ApiToken = {} -Force"),
    "protobuf": ("// {}", 'option api_token = "{}";', "option api_token = {};"),
    "r": ("# {}", "api_token <- '{}'", "api_token <- {}"),
    "ruby": ("# {}", "api_token = '{}'", "api_token = {}"),
    "scala": ("// {}", 'val apiToken = "{}"', "val apiToken = {}"),
    "solidity": ("// {}", 'string apiToken = "{}";', "string apiToken = {};"),
    "sql": ("-- {}", "SET api_token = '{}';", "SET api_token = {};"),
    "swift": ("// {}", 'let apiToken = "{}"', "let apiToken = {}"),
    "verilog": ("// {}", 'parameter api_token = "{}";', "parameter api_token = {};"),
    "zig": ("// {}", 'const api_token = "{}";', "const api_token = {};"),
}


@pytest.mark.parametrize("language", OTHER_PROGRAMS)
def test_redaction_changes_strings_and_comments_and_no_name(language: str) -> None:
    rng = random.Random(language)
    secret, name = f"ghp_{random_text(rng, 36)}", f"x{random_text(rng, 32)}"
    comment, text, code = OTHER_PROGRAMS[language]
    data = "\n".join([comment.format(f"token: {secret}"), text.format(secret), code.format(name), ""]).encode()
    after = redacted(data, find_secrets(data, NO_PII, language))
    assert secret.encode() not in after
    assert len(after) == len(data)
    assert after.endswith(data[data.rindex(b"\n", 0, len(data) - 1) :])  # the line of the name
    assert code_tokens(after, language) == code_tokens(data, language)


def test_every_language_is_tested_for_what_a_redaction_changes() -> None:
    prose = {"html", "markdown", "restructuredtext"}
    assert set(OTHER_PROGRAMS) | set(LANGUAGES_WITH_GRAMMAR) == set(LANGUAGES) - prose


def code_tokens(data: bytes, language: str) -> list[int]:
    """The tokens that are no strings."""
    tokens = tokens_of(data, language)
    return tokens.hashes[tokens.kinds != STRING].tolist()  # type: ignore[no-any-return]


SERVICES = {
    "groq-key": "gsk_{52}",
    "xai-key": "xai-{80}",
    "nvidia-key": "nvapi-{64}",
    "replicate-token": "r8_{37}",
    "telegram-token": "7391846205:AA{33}",
    "discord-token": "MT{22}.G{5}.{38}",
    "discord-webhook": "https://discord.com/api/webhooks/123456789012345678/{68}",
    "notion-token": "ntn_{46}",
    "docker-token": "dckr_pat_{27}",
    "url-password": "redis://:{20}@cache.acme.io:6379/0",
    "bearer-token": "Authorization: Bearer {40}",
}


@pytest.mark.parametrize("kind", SERVICES)
def test_tokens_of_services_are_found(kind: str) -> None:
    rng = random.Random(kind)
    text = re.sub(r"\{(\d+)\}", lambda size: random_text(rng, int(size[1])), SERVICES[kind])
    assert [f.kind for f in scanner_of(NO_PII).find(f'value = "{text}"\n'.encode())] == [kind]
