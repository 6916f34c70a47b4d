"""Folders without tokenizer.json: the ids of tiktoken, SentencePiece and mistral-common, and of tables made by hand."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.unit.tokens.sentence_piece_message import message
from tests.unit.workloads.small_tokenizers import SPECIAL, soup

from lakh.errors import DataError, LakhError, UserError
from lakh.tokens.tokenizer import Tokenizer, convert
from lakh.tokens.tokenizer.folders.ranks import byte_pairs
from lakh.tokens.tokenizer.pre_tokenizers import KIMI, PRE_TOKENIZERS

TEKKEN = PRE_TOKENIZERS["tekken"].patterns[0]
QWEN = PRE_TOKENIZERS["qwen2"].patterns[0]
# Han beside letters of both cases, marks, digits and contractions: what Kimi's pattern treats in ways of its own.
HAN = ["中文", "漢字", "々", "〇", "ー", "English", "ABCdef", "ǅ", "ʰ", "\u0301", "'s", "'LL", "12345", " ", "。", "\n"]
TEXTS = [soup(30, seed) for seed in range(60)] + ["", " ", "  a", "▁a", "e\u0301 A\u030a", *SPECIAL, "<s> a</s>[INST]"]
TEXTS += ["".join(random.Random(seed).choices(HAN, k=20)) for seed in range(60)]


def small_ranks() -> dict[bytes, int]:
    """Tokens that cross every boundary of a pattern: a missing split gives other ids."""
    draw, found = random.Random(0), [bytes([byte]) for byte in range(256)]
    words = [soup(2, seed).encode()[:6] for seed in range(800)] + [
        "".join(draw.choices(HAN, k=2)).encode()[:9] for _ in range(300)
    ]
    for word in words:
        found += [word[:at] for at in range(2, len(word) + 1)]
    return {token: rank for rank, token in enumerate(dict.fromkeys(found))}


RANKS = small_ranks()


def rank_lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def kimi(folder: Path, ranks: dict[bytes, int] = RANKS, **config: Any) -> Path:
    names = {str(len(ranks) + at): name for at, name in ((0, "[BOS]"), (1, "[EOS]"), (4, "<|im_end|>"))}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    described = {"added_tokens_decoder": {number: {"content": name, **flags} for number, name in names.items()}}
    roles = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    code = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "tiktoken.model").write_bytes(rank_lines(ranks))
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, **described, **code, **config}))
    return folder


def tekken(folder: Path, ranks: dict[bytes, int] = RANKS, **change: Any) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    sizes = {"default_vocab_size": len(ranks) + 20, "default_num_special_tokens": 24, "num_vocab_tokens": len(ranks)}
    config = {"pattern": TEKKEN, "version": "v3", **sizes}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, **change}))
    return folder


# --- tokens with ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [KIMI, TEKKEN, QWEN], ids=["Kimi", "Mistral", "Qwen"])
def test_ids_of_ranks_are_those_of_tiktoken(pattern: str) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    ours = byte_pairs("ranks", RANKS, pattern)
    theirs = tiktoken.Encoding("theirs", pat_str=pattern, mergeable_ranks=RANKS, special_tokens={})
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode_ordinary(text), text


def test_ids_of_ranks_in_a_random_order_are_those_of_tiktoken() -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    for seed in range(8):
        draw = random.Random(seed)
        longer = {bytes(draw.choices(b"abc", k=draw.randrange(2, 7))) for _ in range(40)}
        tokens = sorted({bytes([byte]) for byte in range(256)} | longer)
        ranks = {token: rank for rank, token in enumerate(draw.sample(tokens, len(tokens)))}
        ours = byte_pairs("ranks", ranks, r"\S+|\s+")
        theirs = tiktoken.Encoding("theirs", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
        for _ in range(200):
            text = "".join(draw.choices("abc", k=draw.randrange(1, 30)))
            assert ours.encode(text).ids == theirs.encode_ordinary(text), text


def few_ranks(*more: str) -> dict[bytes, int]:
    tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in more)]
    return {token: rank for rank, token in enumerate(tokens)}


# 256 "in", 257 "ing", 258 " s", 259 "tr", 260 "string", 261 "中", 262 "中文"
WORDS = few_ranks("in", "ing", " s", "tr", "string", "中", "中文")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ing", [257]),
        ("sing", [ord("s"), 257]),
        ("string", [260]),  # a piece that is a token: no merges lead to it
        (" string", [258, 259, 257]),
        ("in\ning", [256, ord("\n"), 257]),
        ("中文ing", [262, 257]),
        ("x中文", [ord("x"), 262]),
        ("1234", [ord(digit) for digit in "1234"]),
        ("[EOS]", [ord(letter) for letter in "[EOS]"]),
        ("\x00", [0]),
    ],
)
def test_kimi_by_hand(text: str, ids: list[int], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(kimi(tmp_path, WORDS))
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_kimi_has_256_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(kimi(tmp_path, WORDS))
    first = len(WORDS)
    assert tokenizer.vocab_size == first + 256
    assert (tokenizer.end_ids, tokenizer.begin_ids) == ((first + 1,), ())
    assert tokenizer.find("<|im_end|>") == first + 4
    assert tokenizer.token(first + 5) == f"<|reserved_token_{first + 5}|>"


SOURCE = """
import os
os.abort()  # lakh reads this file and does not run it

class TikTokenTokenizer(PreTrainedTokenizer):
    pat_str = "|".join([PATTERNS])
"""


def test_code_of_a_folder_is_not_run_and_must_split_as_expected(tmp_path: Path) -> None:
    kimi(tmp_path, WORDS)
    alternatives = "[\\p{Han}]+|".join(["", ""]), KIMI.removeprefix("[\\p{Han}]+|")
    known = ", ".join(repr(part.rstrip("|")) for part in alternatives)
    (tmp_path / "tokenization_kimi.py").write_text(SOURCE.replace("PATTERNS", known))
    assert Tokenizer.load(tmp_path).encode("ing") == [257]
    (tmp_path / "tokenization_kimi.py").write_text(SOURCE.replace("PATTERNS", repr(QWEN)))
    with pytest.raises(UserError, match=r"tokenization_kimi\.py: splits texts by another pattern"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text("class (")
    with pytest.raises(UserError, match=r"tokenization_kimi\.py: is no Python code"):
        Tokenizer.load(tmp_path)


def test_qwen_normalizes_and_has_208_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(rank_lines(few_ranks("é")))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("e\u0301") == [256]
    assert tokenizer.encode("12") == [ord("1"), ord("2")]
    assert tokenizer.vocab_size == 257 + 208
    assert tokenizer.end_ids == (257,)
    assert [tokenizer.token(number) for number in (258, 259, 260, 464)] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|extra_0|>",
        "<|extra_204|>",
    ]


def test_tekken_by_hand(tmp_path: Path) -> None:
    """24 special tokens come first, and the vocabulary leaves the last four ranks out."""
    tokenizer = Tokenizer.load(tekken(tmp_path, WORDS))
    assert tokenizer.vocab_size == len(WORDS) + 20
    assert tokenizer.encode("sing 中") == [
        24 + ord("s"),
        24 + 257,
        24 + ord(" "),
        *(24 + byte for byte in "中".encode()),
    ]
    assert tokenizer.encode("</s>[INST]") == [24 + byte for byte in b"</s>[INST]"]
    assert (tokenizer.begin_ids, tokenizer.end_ids, tokenizer.pad_id) == ((1,), (2,), 11)
    assert tokenizer.fim is not None
    assert tokenizer.fim[:3] == (14, 16, None)
    assert tokenizer.token(23) == "<SPECIAL_23>"
    assert tokenizer.decode([1, 24 + 257, 3], show_special=True) == "<s>ing[INST]"
    inner = tokenizers.Tokenizer.from_buffer(tokenizer.raw)
    assert inner.encode("ing").ids == [1, 24 + 257]


def test_tekken_names_its_special_tokens(tmp_path: Path) -> None:
    special = [
        {"rank": rank, "token_str": name, "is_control": True}
        for rank, name in enumerate(["<unk>", "<s>", "</s>", "[X]"])
    ]
    tokenizer = Tokenizer.load(tekken(tmp_path, WORDS, special_tokens=special))
    assert [tokenizer.token(number) for number in (3, 4)] == ["[X]", "<SPECIAL_4>"]
    assert tokenizer.pad_id is None


def test_ids_of_tekken_are_those_of_mistral_common(tmp_path: Path) -> None:
    module = pytest.importorskip(
        "mistral_common.tokens.tokenizers.tekken", reason="mistral-common is not installed", exc_type=ImportError
    )
    ours, theirs = Tokenizer.load(tekken(tmp_path)), module.Tekkenizer.from_file(tmp_path / "tekken.json")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, bos=False, eos=False), text
    assert ours.vocab_size == theirs.n_words


# --- SentencePiece ------------------------------------------------------------------------------------------


def sentence_piece(folder: Path, raw: bytes | None = None, **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(message() if raw is None else raw)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab", [263]),  # ▁ab
        ("aab", [264, 262]),  # ▁a, ab: not a, since ab is made first
        ("ba", [259, 265]),
        ("  ab", [266, 263]),
        ("é", [259, 3 + 0xC3, 3 + 0xA9]),
        ("</s>", [259, *(3 + byte for byte in b"</s>")]),
        ("", []),
    ],
)
def test_sentence_piece_by_hand(text: str, ids: list[int], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentence_piece(tmp_path))
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_sentence_piece_roles(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentence_piece(tmp_path))
    assert (tokenizer.begin_ids, tokenizer.end_ids, tokenizer.pad_id) == ((1,), (2,), None)
    assert tokenizer.fim is not None
    assert tokenizer.fim[:3] == (267, 268, 269)
    assert tokenizer.prefix_space == "always"
    described = {"270": {"content": "<pad>", "special": True}}
    config = {"legacy": False, "add_bos_token": False, "pad_token": "<pad>", "added_tokens_decoder": described}
    again = Tokenizer.load(sentence_piece(tmp_path, **config))
    assert (again.begin_ids, again.pad_id, again.prefix_space) == ((), 270, "first")
    assert again.encode("aab") == [264, 262]
    unprefixed = Tokenizer.load(sentence_piece(tmp_path, message(normalizer={3: 0})))
    assert unprefixed.encode("ab") == [262]


@pytest.mark.parametrize("config", [{}, {"legacy": False}], ids=["legacy", "new"])
def test_ids_of_sentence_piece_are_those_of_its_package(config: dict[str, Any], tmp_path: Path) -> None:
    package = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    lines = [line for seed in range(300) for line in soup(40, seed).split("\n") if line.strip()]
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    ours = Tokenizer.load(sentence_piece(tmp_path, (tmp_path / "tokenizer.model").read_bytes(), **config))
    theirs = package.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        if not config or text[:1] not in (" ", "▁"):  # transformers puts no space before one (legacy: false)
            assert ours.encode(text) == theirs.encode(text), text
    assert (ours.begin_ids[0], ours.end_ids[0]) == (theirs.bos_id(), theirs.eos_id())


def test_a_new_folder_adds_a_space_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    ours = Tokenizer.load(sentence_piece(tmp_path, legacy=False))
    model = json.loads(ours.raw)["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    theirs = transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, legacy=False)
    for text in ["ab", "aab ba  ab", " ab", "  ab", "bab\nab", "é ab"]:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.encode_pieces(["ab", 2, "ab"]) == theirs("ab</s>ab", add_special_tokens=False)["input_ids"]


# --- what a folder keeps, and what is refused ---------------------------------------------------------------


def test_the_converted_tokenizer_is_what_transformers_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for make in (kimi, tekken, sentence_piece):
        for file in source.iterdir():
            file.unlink()
        folder = make(source)
        found = convert(str(folder))
        for name, content in {"tokenizer.json": found.raw, **found.files}.items():
            (out / name).write_bytes(content)
        ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(out)
        assert Tokenizer.load(out).raw == ours.raw
        assert theirs.eos_token_id == ours.end_ids[0]
        for text in ("def f(x):\n    return x", "中文 a"):
            assert theirs(text)["input_ids"] == [*ours.begin_ids, *ours.encode(text)]


KNOWN = {"tokenizer_class": "TikTokenTokenizer"}


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        ({"tiktoken.model": b""}, UserError, r"tokenizer_class .* is None, from which .* tiktoken\.model"),
        ({"tiktoken.model": b"YQ== 0 1", "tokenizer_config.json": KNOWN}, DataError, "line 1 is no token"),
        ({"tiktoken.model": b"YQ 0", "tokenizer_config.json": KNOWN}, DataError, "line 1 is no token"),
        ({"tiktoken.model": b"YQ== 0\nYg== 5", "tokenizer_config.json": KNOWN}, DataError, "ranks that repeat or are"),
        ({"tiktoken.model": b"YQ== 0", "tokenizer_config.json": KNOWN}, DataError, "no token of the byte 0"),
        ({"tekken.json": b"[]"}, DataError, r"tekken\.json: is not a JSON object"),
        ({"tekken.json": b"{}"}, DataError, r"tekken\.json: is no tokenizer of Mistral"),
        ({"tokenizer.model": b"YQ== 0\nYg== 1\n"}, UserError, r"tokenizer\.model: is a file of tiktoken"),
        ({"tokenizer.model": b"other"}, DataError, "is no model of SentencePiece"),
        ({"tokenizer.model": b""}, LakhError, r"tokenizer\.model"),
        ({"tokenizer.model": message()[:500]}, LakhError, r"tokenizer\.model"),
        ({"tokenizer.model": message({3: 1})}, UserError, "is a model of the kind unigram; lakh reads bpe"),
        (
            {"tokenizer.model": message(normalizer={1: b"nmt_nfkc", 2: b"x"})},
            UserError,
            r"normalizes texts \(nmt_nfkc\)",
        ),
        ({"tokenizer.model": message(normalizer={4: 1})}, UserError, "removes spaces"),
        ({"tokenizer.model": message({24: 1})}, UserError, "marks spaces in a way of its own"),
        ({"spiece.model": b""}, UserError, r"no such file; spiece\.model is there, which lakh does not read"),
        ({"vocab.txt": b""}, UserError, r"vocab\.txt is there"),
        ({"tokenizer.model.v3": b""}, UserError, r"tokenizer\.model\.v3 is there"),
    ],
)
def test_other_files_are_refused_by_name(
    files: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(kind, match=words):
        Tokenizer.load(tmp_path)


def test_damaged_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has a pattern that is no regular expression"):
        Tokenizer.load(
            tekken(
                tmp_path,
                WORDS,
                config={**json.loads((tekken(tmp_path, WORDS) / "tekken.json").read_text())["config"], "pattern": "["},
            )
        )
    with pytest.raises(DataError, match="ids that repeat or are missing"):
        Tokenizer.load(tekken(tmp_path, WORDS, vocab=[]))
    with pytest.raises(UserError, match="has <s> as a special token and as a token of texts"):
        Tokenizer.load(tekken(tmp_path, few_ranks("<s>", "a b", "a c", "a d", "a e")))


def test_any_cut_of_a_message_is_an_error_of_lakh(tmp_path: Path) -> None:
    raw = message()
    for end in range(0, len(raw), 61):
        with pytest.raises(LakhError):
            Tokenizer.load(sentence_piece(tmp_path, raw[:end]))
