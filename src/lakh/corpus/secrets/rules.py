"""The kinds of secrets, and the format of each.

Three tables to extend:

    TOKENS    start with their own prefix (ghp_..., AKIA...): found anywhere
    NAMED     look like any random text: found after the name of their service
    SPECIAL   need a regular expression of their own: key blocks, headers, URLs, markup, generic assignments

The formats are those that the services document or that are seen in public; the notation is that of shapes.py. Each
rule has hints, literal texts (lower case) of which a document must contain one, for the search without hyperscan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from lakh.corpus.secrets.shapes import regex_of

__all__ = ["NAMED_KIND", "SecretRule", "named_kind", "rules"]

NAMED_KIND = "named"
"""All of NAMED is one rule; `named_kind` gives the service of a match."""


@dataclass(frozen=True)
class SecretRule:
    kind: str
    pattern: str
    """RE2; group 1 is the secret."""
    quick: str | tuple[str, ...]
    """For hyperscan: the pattern, or a bounded prefix of it; several if one would be slow."""
    hints: tuple[str, ...]
    min_entropy: float = 0.0
    """Bits per character of the secret."""
    checked: bool = True
    """Whether false_positives.py checks the match."""


# kind: shapes. A leading ~ ignores case. A trailing word boundary is checked for all.
TOKENS = """
1password-key: A3-<u6>-<u11>-<u5>-<u5>-<u5> A3-<u6>-<u6>-<u5>-<u5>-<u5>-<u5>
1password-service-account: ops_eyJ<b250->
adobe-client-secret: ~p8e-<a32>
age-key: AGE-SECRET-KEY-1<u58>
airtable-token: pat<a14>.<x64>
alibaba-access-key: ~LTAI<a20>
anthropic-key: sk-ant-{admin01|api03}-<w93>AA
artifactory-token: AKCp<a69> cmVmd<a59>
atlassian-token: ATATT3<s186>
authress-key: ~{sc|ext|scauth|authress}_<a5-30>.<a4-6>.acc{_|-}<w10-32>.<k30-120>
aws-access-key: {AKIA|ASIA|ABIA|ACCA}<u16> A3T<u17>
aws-bedrock-key: ABSK<b109-269>
azure-client-secret: <z3><d1>Q~<z31-34>
clickhouse-key: 4b1d<a38>
clojars-token: ~CLOJARS_<a60>
cloudflare-origin-key: v1.0-<x24>-<x146>
databricks-token: dapi<x32>[-<d1>]
defined-networking-token: ~dnkey-<s26>-<s52>
digitalocean-token: ~{doo|dop|dor}_v1_<x64>
doppler-token: ~dp.pt.<a43>
dropbox-token: ~sl.<s135>
duffel-token: ~duffel_{test|live}_<s43>
dynatrace-token: ~dt0c01.<a24>.<a64>
easypost-token: ~{EZAK|EZTK}<a54>
facebook-page-token: ~{EAAM|EAAC}<a100->
flutterwave-key: ~{FLWSECK_TEST|FLWPUBK_TEST}-<a12> ~{FLWSECK_TEST|FLWPUBK_TEST}-<a32>-X
flyio-token: fo1_<w43> {fm1a|fm1r|fm2}_<b100->
frameio-token: ~fio-u-<s64>
gcp-api-key: AIza<w35>
github-token: {ghp|gho|ghu|ghs|ghr}_<a36> github_pat_<w82>
gitlab-token: {gldt|glft|glffct|glsoat|glpat|glrt}-<w20> glimt-<w25> glagent-<w50> gloas-<w64> glptt-<x40>
gitlab-token: glcbt-<a1-5>_<w20> GR1348941<w20> glpat-<w27-300>.<a9> glrt-t<d1>_<w27-300>.<a9>
gitlab-session: _gitlab_session=<a32>
grafana-token: ~eyJrIjoi<a70-400> ~glc_<b32-400> ~glsa_<a32>_<x8>
harness-key: {pat|sat}.<w22>.<a24>.<a20>
heroku-key: HRKU-AA<w58>
huggingface-token: {hf|api_org}_<l34>
infracost-token: ico-<a32>
intra42-secret: s-s4t2{ud|af}-<x64>
linear-key: ~lin_api_<a40>
maxmind-key: <a6>_<a29>_mmk
newrelic-key: NRAK-<a27> NRJS-<x19> NRII-<w32>
notion-token: ntn_<d11><a35>
npm-token: ~npm_<a36>
octopus-key: API-<u26>
openai-key: sk-<a20>T3BlbkFJ<a20> sk-{proj|svcacct|admin}-<w58>T3BlbkFJ<w58> sk-{proj|svcacct|admin}-<w74>T3BlbkFJ<w74>
openai-key: sk-{proj|svcacct|admin}-<w58>T3BlbkFJ<w74> sk-{proj|svcacct|admin}-<w74>T3BlbkFJ<w58>
openshift-token: sha256~<w43>
perplexity-key: pplx-<a48>
plaid-token: ~access-{sandbox|development|production}-<uuid>
planetscale-token: ~{pscale_tkn|pscale_oauth|pscale_pw}_<s32-64>
postman-key: ~PMAK-<x24>-<x34>
prefect-token: pnu_<a36>
pulumi-token: pul-<x40>
pypi-token: pypi-AgEIcHlwaS5vcmc<w50-1000>
readme-token: rdme_<a70>
rubygems-token: rubygems_<x48>
scalingo-token: tk-us-<w48>
sendgrid-token: ~SG.<s66>
sendinblue-token: ~xkeysib-<x64>-<a16>
sentry-token: sntrys_eyJpYXQiO<b20-420>_<b43> sntrys_eyJpYXQiO<b20-420>=_<b43> sntrys_eyJpYXQiO<b20-420>==_<b43>
sentry-token: sntryu_<x64>
settlemint-token: {sm_aat|sm_pat|sm_sat}_<a16>
shippo-token: shippo_{live|test}_<x40>
shopify-token: {shpat|shpca|shppa|shpss}_<x32>
slack-token: ~xapp-<d1>-<a1->-<d1->-<a1-> xoxb-<d8-14>-<a18-26> ~xoxe-<d1>-<a146>
slack-token: xoxb-<d10-13>-<d10-13><w0-60> {xoxo|xoxs}-<d1->-<d1->-<d1->-<x1-> {xoxa|xoxr}-[<d1>-]<a8-48>
slack-token: {xoxp|xoxe}-<d10-13>-<d10-13>-<d10-13>-<w28-34>
sourcegraph-token: ~sgp_<x40> ~sgp_<x16>_<x40> ~sgp_local_<x40>
square-token: {EAAA|sq0atp-}<w22-60>
stripe-key: {sk|rk}_{test|live|prod}_<a10-99>
twilio-key: SK<x32>
typeform-token: ~tfp_<s59>
vault-token: hvb.<w138-300> hvs.<w90-120> s.<a24>
yandex-key: AQVN<w35-38>
"""
# Kinds with a short or common prefix: the rest must look random.
SUSPECT = {
    "vault-token": 3.3, "twilio-key": 3.0, "square-token": 3.5, "clickhouse-key": 3.5, "huggingface-token": 3.3,
    "aws-access-key": 2.8, "octopus-key": 3.0, "gcp-api-key": 3.7, "dropbox-token": 4.0, "airtable-token": 3.0,
    "easypost-token": 3.5, "azure-client-secret": 3.3, "maxmind-key": 3.5, "alibaba-access-key": 3.2,
    "stripe-key": 2.6, "slack-token": 2.0, "artifactory-token": 4.0, "gitlab-token": 3.0, "yandex-key": 3.8,
}  # fmt: skip

# service words (as part of a name, any case): shapes of the value, any letter case
NAMED = """
adafruit: <w32>
adobe: <x32>
airtable: <a17>
algolia: <a32>
alibaba: <a30>
asana: <d16> <a32>
atlassian confluence jira: <a24>
beamer: b_<s44>
bitbucket: <a32> <s64>
bittrex: <a32>
meraki: <x40>
cloudflare: <w40> <x37>
codecov: <a32>
cohere co_api_key: <a40>
coinbase: <w64>
confluent: <a16> <a64>
contentful: <s43>
datadog: <a40>
discord: <x64> <d18> <s32>
droneci: <a32>
dropbox: <a15> <a11>AAAAAAAAAA<s43>
etsy: <a24>
facebook: <x32>
fastly: <s32>
finicity: <x32> <a20>
finnhub: <a20>
flickr: <a32>
freshbooks: <a64>
gitter: <w40>
gocardless: live_<s40>
heroku: <uuid>
hubspot: <uuid>
intercom: <s60>
jfrog artifactory bintray xray: <a73> <a64>
kraken: <k80-90>
kucoin: <x24> <uuid>
launchdarkly: <s40>
linear: <x32>
linkedin linked_in linked-in: <a14> <a16>
lob: {live|test}_<x35> {test|live}_pub_<x31>
looker: <a20> <a24>
mailchimp mailchimpsdk.initialize: <x32>-us<d2>
mailgun: key-<x32> pubkey-<x32> <a32>-<a8>-<a8>
mapbox: pk.<a60>.<a22>
mattermost: <a26>
messagebird message_bird message-bird: <a25> <uuid>
netlify: <s40-46>
newrelic new_relic new-relic: <a64>
nytimes newyorktimes new-york-times, new-york-times: <s32>
okta: 00<s40>
plaid: <a24> <a30>
privateai private_ai private-ai: <a32>
rapidapi: <w50>
sendbird: <uuid> <x40>
sentry: <x64>
contribsys: <x8>:<x8>
snyk: <uuid>
sonar: <s40> {squ|sqp|sqa}_<s40>
sourcegraph: <x40>
squarespace: <uuid>
sumo: su<a12> <a64>
telegr: <d5-16>:A<w34>
travis: <a22>
twitch: <a30>
twitter: <a45> <d15-25>-<a20-40> <a25> <a50> AAAAAAAAAAAAAAAAAAAAAA<p80-100>
yandex: YC<w38> t1.<s1->.<s86-88>
zendesk: <a40>
"""

# name ... operator ... value: the text between a name and its value in source, YAML, JSON, shell and markup
NAME_TAIL = r"""[ \t\w.\-]{0,20}[\s'"\])]{0,4}(?:=|>|:{1,3}=|\|\||:|=>|\?=|,)"""
BETWEEN = NAME_TAIL + r"""[\x60'"\s=]{0,5}"""
END = r"""(?:[\x60'"\s;,)\]}<&]|\\|$)"""
CREDENTIAL = r"access|auth|api|credential|creds|key|passw(?:or)?d|passphrase|pwd|secret|token"

SPECIAL = (
    SecretRule(
        "private-key",
        r"(?i)(-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----[\s\S]{64}[\s\S]*?KEY(?: BLOCK)?-----)",
        r"(?i)-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY",
        ("private key",),
        checked=False,
    ),
    SecretRule(
        "jwt",
        r"\b(ey[a-zA-Z0-9_-]{17,}\.ey[a-zA-Z0-9/\\_-]{17,}\.(?:[a-zA-Z0-9/\\_-]{10,}={0,2})?)",
        r"\bey[a-zA-Z0-9_-]{17}[a-zA-Z0-9_-]*\.ey[a-zA-Z0-9/\\_-]{17}",
        (".ey",),
        3.0,
    ),
    SecretRule(
        "jwt", r"\b(ZXlK[a-zA-Z0-9/\\_+\-\r\n]{44,}={0,2})", r"\bZXlK[a-zA-Z0-9/\\_+\-\r\n]{44}", ("zxlk",), 3.5
    ),
    SecretRule(
        "aws-bedrock-key",
        r"(bedrock-api-key-YmVkcm9jay5hbWF6b25hd3MuY29t[A-Za-z0-9+/=]*)",
        r"bedrock-api-key-YmVkcm9jay5hbWF6b25hd3MuY29t",
        ("bedrock-api-key-",),
        checked=False,
    ),
    SecretRule(
        "authorization-header",
        r"""(?i)authorization["']?\s{0,3}[:=,]\s{0,3}["']?(?:basic|bearer|(?:api-)?token)[ \t]{1,3}([\w=~@.+/\-]{8,})""",  # noqa: E501
        r"(?i)authorization.{0,8}(?:basic|bearer|token)[ \t]{1,3}[\w=~@.+/\-]{8}",
        ("authorization",),
        2.75,
    ),
    SecretRule(
        "authorization-header",
        r"""(?i)\bcurl\b[\s\S]{0,400}?\s(?:-H|--header)[= \t]{0,5}["'](?:X-[\w\-]{0,30})?"""
        r"""(?:Api-?)?(?:Key|Token|Auth[\w\-]{0,12}|Secret)[ \t]{0,5}:[ \t]{0,5}"""
        r"""(?:(?:basic|bearer|token)[ \t]{1,3})?([\w=~@.+/\-]{8,})""",
        r"(?i)\bcurl\b[\s\S]{0,400}(?:-H|--header)",
        ("curl",),
        2.75,
    ),
    SecretRule(
        "curl-user",
        r"""\bcurl\b[\s\S]{0,400}?\s(?:-u|--user)[= \t]{0,5}"""
        r"""("[^"\n]{3,}"(?::\S+)?|'[^'\n]{3,}'(?::\S+)?|[\w$@.\-]+:[^\s"'][^\s"']+|[\w$@.\-]+:(?:"[^"\n]+"|'[^'\n]+'))""",
        r"\bcurl\b[\s\S]{0,400}\s(?:-u|--user)",
        ("curl",),
        2.0,
    ),
    SecretRule(
        "url-password",
        r"(?i)\bhttps?://([a-f0-9]{8}:[a-f0-9]{8})@",
        r"(?i)\bhttps?://[a-f0-9]{8}:[a-f0-9]{8}@",
        ("://",),
    ),
    SecretRule(
        "url-password",
        r"(?i)\b[a-z][a-z0-9+]{1,12}://[\w.\-%]{1,64}:([^\s/:@'\"<>{}$()\[\]]{6,100})@[\w.\-]{3,}",
        r"(?i)\b[a-z][a-z0-9+]{1,12}://[\w.\-%]{1,64}:[^\s/:@'\"<>{}$()\[\]]{6,100}@[\w.\-]{3}",
        ("://",),
        2.8,
    ),
    SecretRule(
        "kubernetes-secret",
        r"""(?i)\bkind:[ \t]*["']?secret\b["']?[\s\S]{0,200}?\bdata:[\s\S]{0,100}?\s[\w.\-]+:(?:[ \t]*(?:\||>[-+]?)\s+)?[ \t]*["']?([a-z0-9+/]{10,}={0,3})""",  # noqa: E501
        r"(?i)\bkind:[ \t]*[\"']?secret\b",
        ("secret",),
        1.5,
    ),
    SecretRule(
        "kubernetes-secret",
        r"""(?i)\bdata:[\s\S]{0,100}?\s[\w.\-]+:(?:[ \t]*(?:\||>[-+]?)\s+)?[ \t]*["']?([a-z0-9+/]{10,}={0,3})["']?[\s\S]{0,200}?\bkind:[ \t]*["']?secret\b""",  # noqa: E501
        r"(?i)\bkind:[ \t]*[\"']?secret\b",
        ("secret",),
        1.5,
    ),
    SecretRule(
        "nuget-password",
        r"""(?i)<add key="(?:ClearText)?Password"\s*value="([^"\n]{8,})"\s*/>""",
        r"""(?i)<add key="(?:ClearText)?Password"\s*value=""",
        ("<add key",),
        1.0,
    ),
    SecretRule(
        "freemius-key",
        r"""(?i)["']secret_key["']\s*=>\s*["'](sk_[^\s"']{29})["']""",
        r"""(?i)["']secret_key["']\s*=>\s*["']sk_""",
        ("secret_key",),
    ),
    SecretRule(
        "facebook-token",
        r"\b([0-9]{15,16}(?:\||%)[0-9A-Za-z_\-]{27,40})(?:[\x60'\"\s;]|\\|$)",
        r"\b[0-9]{15,16}(?:\||%)[0-9A-Za-z_\-]{27,40}",
        ("|", "%"),
        3.0,
    ),
    SecretRule(
        "slack-webhook",
        r"(hooks.slack.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{43,56})",
        r"hooks.slack.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{43}",
        ("hooks",),
    ),
    SecretRule(
        "slack-token", r"(?i)(xoxe.xox[bp]-\d-[A-Z0-9]{163,166})", r"(?i)xoxe.xox[bp]-\d-[A-Z0-9]{163}", ("xoxe",), 2.0
    ),
    SecretRule(
        "teams-webhook",
        r"([a-z0-9]+\.webhook\.office\.com/webhookb2/[a-z0-9\-]{36}@[a-z0-9\-]{36}/IncomingWebhook/[a-z0-9]{32}/[a-z0-9\-]{36})",
        r"webhook\.office\.com/webhookb2/[a-z0-9\-]{36}@",
        ("webhook.office.com",),
    ),
    SecretRule(
        "terraform-token",
        r"(?i)\b([a-z0-9]{14}\.atlasv1\.[a-z0-9_=\-]{60,70})",
        r"(?i)\b[a-z0-9]{14}\.atlasv1\.[a-z0-9_=\-]{60}",
        (".atlasv1.",),
        3.3,
    ),
    SecretRule(
        "password",
        rf"""(?i)(?:passw(?:or)?d|pwd|passphrase){NAME_TAIL}[\s=]{{0,5}}("[^"\s]{{8,40}}"|'[^'\s]{{8,40}}')""",
        rf"""(?i)(?:passw(?:or)?d|pwd|passphrase){BETWEEN}["']?[^"'\s]{{6}}""",
        ("passw", "pwd", "passphrase"),
        2.0,
    ),
    SecretRule(
        "generic-credential",
        rf"""(?i)(?:{CREDENTIAL}){BETWEEN}([\w.=+/\-]{{10,150}}){END}""",
        rf"""(?i)(?:{CREDENTIAL}){BETWEEN}[\w.=+/\-]{{10}}""",
        ("access", "auth", "api", "cred", "key", "passw", "passphrase", "pwd", "secret", "token"),
        3.5,
    ),
)


@lru_cache(maxsize=1)
def rules() -> tuple[SecretRule, ...]:
    """All rules, the most specific first: of two overlapping matches, the earlier rule wins."""
    return (*_tokens(), *SPECIAL[:-2], _named_rule(), *SPECIAL[-2:])


def named_kind(name: str, value: str) -> str:
    """The kind of a value after a service's name; "" if it has none of that service's formats."""
    lowered = name.lower()
    for words, shapes in _named():
        if any(word in lowered for word in words) and any(shape.fullmatch(value) for shape in shapes):
            return f"{words[0].replace('_', '-')}-credential"
    return ""


def _tokens() -> list[SecretRule]:
    made = []
    for line in TOKENS.strip().splitlines():
        kind, _, shapes = line.partition(": ")
        for written in shapes.split():
            shape = written.removeprefix("~")
            flag = "(?i)" if written != shape else ""
            body = regex_of(shape)
            tail = "={0,3}" if "<b" in shape and "=" not in shape else ""
            start = r"\b" if re.match(r"[\w<{\[]", shape) and not shape.startswith("<z") else ""
            made.append(
                SecretRule(
                    kind,
                    f"{flag}{start}({body}{tail})",
                    f"{flag}{start}{_bounded(body)}",
                    _hints(shape),
                    SUSPECT.get(kind, 2.0),
                )
            )
    return made


def _hints(shape: str) -> tuple[str, ...]:
    """The longest literal of a shape, once for each choice at its start."""
    opening = re.match(r"\{([^{}]+)\}([^<{\[]*)", shape)
    if opening:
        return tuple((choice + opening.group(2)).lower() for choice in opening.group(1).split("|"))
    literals = re.split(r"<[^>]*>|\[[^\]]*\]|\{[^}]*\}", shape)
    return (max(literals, key=len).lower(),)


def _bounded(body: str) -> str:
    """For hyperscan, the shortest match is enough."""
    return re.sub(r"(\{[1-9]\d*),\d*\}$", r"\1}", body)


@lru_cache(maxsize=1)
def _named() -> tuple[tuple[tuple[str, ...], tuple[re.Pattern[str], ...]], ...]:
    table = []
    for line in NAMED.strip().splitlines():
        words, _, shapes = line.partition(": ")
        compiled = tuple(re.compile(regex_of(shape), re.IGNORECASE) for shape in shapes.split())
        table.append((tuple(words.split()), compiled))
    return tuple(table)


def _named_rule() -> SecretRule:
    words = sorted({word for names, _ in _named() for word in names}, key=lambda word: (-len(word), word))
    names = "|".join(re.escape(word) for word in words)
    value = r"[\w=+/.:%|~\-]{12,140}"
    return SecretRule(
        NAMED_KIND,
        rf"(?i)((?:{names}){BETWEEN})({value}){END}",
        # one expression a word: hyperscan finds the literals first and continues only there
        tuple(rf"(?i){re.escape(word)}{NAME_TAIL}" for word in words),
        tuple(words),
    )
