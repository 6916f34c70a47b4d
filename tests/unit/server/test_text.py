"""Text in pieces: never taken back, never different from the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakh.server.text import StopText, TextStream

pieces = st.lists(st.text("ab\n", max_size=4), max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces=pieces, stops=stops)
def test_shown_text_ends_before_the_first_stop_and_is_otherwise_whole(pieces: list[str], stops: list[str]) -> None:
    stop, shown, whole = StopText(stops), "", ""
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
def test_no_more_is_held_back_than_a_stop_needs(pieces: list[str], stops: list[str]) -> None:
    stop, shown, whole = StopText(stops), "", ""
    for piece in pieces:
        whole += piece
        shown += stop.push(piece)
        held = whole[len(shown) :]
        assert stop.found or held == "" or any(text.startswith(held) for text in stops)


@given(st.binary(max_size=40))
def test_bytes_in_pieces_decode_as_they_do_together(data: bytes) -> None:
    def decode(ids: object) -> str:
        return bytes(ids).decode("utf-8", "replace")  # type: ignore[call-overload, no-any-return]

    stream = TextStream(decode)
    shown = ""
    for number in data:
        shown += stream.push(number)
        assert decode(data).startswith(shown)
    assert shown + stream.finish() == decode(data)


def test_a_decoder_that_drops_the_first_space_still_spaces_words() -> None:
    stream = TextStream(lambda ids: " ".join(f"w{number}" for number in ids))
    assert [stream.push(number) for number in (1, 2, 3)] == ["w1", " w2", " w3"]
