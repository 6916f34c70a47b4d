"""SentencePiece tokenizers put a space before a text: not again inside it, as transformers does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.encoder import PromptEncoder
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

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
    made.decoder = decoders.Metaspace("▁")
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
def test_a_continuation_has_no_space_of_its_own(tmp_path: Path, scheme: str) -> None:
    tokenizer = make(tmp_path, scheme)
    names = [tokenizer.token(number) for number in tokenizer.encode_continuation("def x")]
    assert names == ["d", "e", "f", "▁x"]
    assert tokenizer.token(tokenizer.encode("def")[0]) == ("d" if scheme == "never" else "▁d")
