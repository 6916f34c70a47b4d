"""Stop strings and detokenization: emitted text is final and equals the whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakh.server.detokenizer import Detokenizer, DetokenizerStream, decodes_bytewise
from lakh.server.stopping import StopStrings
from lakh.tokens.tokenizer import Tokenizer

pieces = st.lists(st.text("ab\n", max_size=4), max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces=pieces, stops=stops)
def test_emitted_text_ends_before_the_first_stop_and_is_otherwise_complete(pieces: list[str], stops: list[str]) -> None:
    stop, shown, whole = StopStrings(stops), "", ""
    for piece in pieces:
        whole += piece
        shown += stop.push(piece)
        assert whole.startswith(shown)
        if any(text in whole for text in stops):
            assert stop.found
            assert shown == whole[: min(whole.find(text) for text in stops if text in whole)]
            assert stop.push("more") == stop.finish() == ""
            return
        assert not stop.found
    assert shown + stop.finish() == whole


@given(pieces=pieces, stops=stops)
def test_a_stop_that_is_included_is_the_end_of_the_text(pieces: list[str], stops: list[str]) -> None:
    before, with_it = StopStrings(stops), StopStrings(stops, is_included=True)
    shown, longer = "", ""
    for piece in pieces:
        shown += before.push(piece)
        longer += with_it.push(piece)
        assert before.found == with_it.found
        if before.found:
            assert longer.startswith(shown)
            assert longer[len(shown) :] in stops
            return
        assert longer == shown


@given(pieces=pieces, stops=stops)
def test_only_the_start_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stop, shown, whole = StopStrings(stops), "", ""
    for piece in pieces:
        whole += piece
        shown += stop.push(piece)
        held = whole[len(shown) :]
        assert stop.found or held == "" or any(text.startswith(held) for text in stops)


class UncachedDetokenizer:
    """A detokenizer without a table of token texts."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode

    def token_text(self, token: int) -> None:
        return None


@given(st.binary(max_size=40))
def test_a_byte_stream_decodes_like_the_whole(data: bytes) -> None:
    def decode(ids: object) -> str:
        return bytes(ids).decode("utf-8", "replace")  # type: ignore[call-overload, no-any-return]

    stream = DetokenizerStream(UncachedDetokenizer(decode))  # type: ignore[arg-type]
    shown = ""
    for number in data:
        shown += stream.append(number)
        assert decode(data).startswith(shown)
    assert shown + stream.finish() == decode(data)


def test_a_decoder_that_drops_the_first_space_keeps_later_spaces() -> None:
    stream = DetokenizerStream(UncachedDetokenizer(lambda ids: " ".join(f"w{number}" for number in ids)))  # type: ignore[arg-type]
    assert [stream.append(number) for number in (1, 2, 3)] == ["w1", " w2", " w3"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 299), max_size=40), skip=st.sampled_from(["", "d", "de"]))
def test_table_lookups_give_the_same_text_as_decoding(tokenizer_json: Path, ids: list[int], skip: str) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    remembered, decoded = (
        DetokenizerStream(Detokenizer(tokenizer), skip),
        DetokenizerStream(UncachedDetokenizer(tokenizer.decode), skip),
    )  # type: ignore[arg-type]
    for token in ids:
        assert remembered.append(token) == decoded.append(token)
    assert remembered.finish() == decoded.finish()


def test_only_byte_level_decoders_decode_bytewise(tokenizer_json: Path) -> None:
    description = json.loads(tokenizer_json.read_bytes())
    assert decodes_bytewise(description)
    for other in (
        None,
        {"type": "Metaspace"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]},
    ):
        assert not decodes_bytewise({**description, "decoder": other})
    tokenizer = Tokenizer(json.dumps({**description, "decoder": None}).encode())
    assert Detokenizer(tokenizer).token_text(tokenizer.encode("d")[0]) is None
