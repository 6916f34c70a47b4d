"""SentencePiece tokenizers put a space before a text: not again inside it, as transformers does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lakh.server.engine import Engine, SamplingParams
from lakh.server.offline import OfflineEngine
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.encoder import PromptEncoder
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.model import CodeModel

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def make(folder: Path, scheme: str) -> Tokenizer:
    """Every character is a token, and so are the words with a space that SentencePiece would have."""
    words = ["<unk>", "<s>", "</s>", "<PRE>", "▁", *"☺[]/INSTdefx for", "▁d", "▁[", "▁x"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "d"), ("▁", "["), ("▁", "x")], unk_token="<unk>"))
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace("▁", prepend_scheme="never" if scheme == "never" else "always")
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("scheme", "found"), [("legacy", "always"), ("always", "always"), ("first", "first"), ("never", "never")]
)
def test_a_chat_prompt_has_the_ids_of_transformers(tmp_path: Path, scheme: str, found: str) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    tokenizer = make(tmp_path, scheme)
    prompts = PromptEncoder(tokenizer, Model(vocab=64))
    prompts.chat_template = ChatTemplate.load(str(tmp_path))
    messages = [ChatMessage("user", "def"), ChatMessage("assistant", "x for"), ChatMessage("user", "x")]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template([message._asdict() for message in messages], return_dict=False)
    assert list(prompts.encode_chat(messages)) == expected
    assert tokenizer.prefix_space == found


@pytest.mark.parametrize("scheme", ["legacy", "always", "first", "never"])
def test_a_completion_keeps_the_space_that_its_first_token_has(tmp_path: Path, scheme: str) -> None:
    tokenizer = make(tmp_path, scheme)
    space_x, d, e = (tokenizer.find(name) for name in ("▁x", "d", "e"))
    tokens = [space_x, d, e]
    assert tokenizer.decode_continuation(tokens) == " xde"
    torch.manual_seed(0)
    spec = Model(layers=1, width=32, heads=2, kv_heads=2, ffn=32, vocab=64, context=64)
    engine = Engine("tiny", spec, CodeModel(spec).state_dict(), tokenizer, device="cpu")

    def text_after(prompt: str, **options: bool) -> str:
        seq = engine.make_sequence(engine.prompts.encode_prompt(prompt), SamplingParams(max_tokens=9), **options)
        return "".join(map(seq.detokenizer.append, tokens)) + seq.detokenizer.finish()

    assert text_after("def") == " xde"
    at_start = " xde" if scheme == "never" else "xde"
    assert text_after("") == at_start  # the space before a text is none of the text
    assert text_after("def", continues_text=False) == at_start
    # Token healing: " x" is repeated, not "x".
    prompts = PromptEncoder(tokenizer, spec)
    healed = prompts.heal(prompts.encode_prompt("def x"))
    assert healed.repeated is not None
    assert healed.repeated.text == " x"
    assert {tokenizer.find("▁"), space_x} <= set(healed.repeated.allowed_after([]) or ())
    seq = engine.make_sequence(healed.ids, SamplingParams(max_tokens=9), repeated=healed.repeated)
    assert [seq.detokenizer.append(token) for token in tokens] == ["", "d", "e"]
    # Whole completions: online, offline, and what transformers decodes from prompt and completion.
    ids = engine.prompts.encode_prompt("def for")
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    (online,), (offline,) = engine.generate([ids], sampling), OfflineEngine(engine).generate([ids], [sampling])
    expected = tokenizer.decode([*ids, *online.tokens])[len(tokenizer.decode(ids)) :]
    assert (online.text, offline.text) == (expected, expected)


@pytest.mark.parametrize("scheme", ["legacy", "always", "first", "never"])
def test_a_continuation_has_no_space_of_its_own(tmp_path: Path, scheme: str) -> None:
    tokenizer = make(tmp_path, scheme)
    names = [tokenizer.token(number) for number in tokenizer.encode_continuation("def x")]
    assert names == ["d", "e", "f", "▁x"]
    assert tokenizer.token(tokenizer.encode("def")[0]) == ("d" if scheme == "never" else "▁d")
