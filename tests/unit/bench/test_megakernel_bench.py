"""The bench of the megakernel: constants and texts that it replaces exist, and are back afterwards."""

import pytest
from bench.decode.megakernel import NO_FLAGS, NO_WEIGHTS, changed, constants_of

from lakh.server.model.gpu import megakernel


def test_constants_are_those_of_the_bits_that_are_measured() -> None:
    busy, parts, source = megakernel.BUSY_BYTES, megakernel.PARTS, megakernel.source
    with changed(8, constants_of("BUSY_BYTES=65536,PARTS=2"), ()):
        assert {**busy, 8: 65536} == megakernel.BUSY_BYTES
        assert {**parts, 8: 2} == megakernel.PARTS
        assert megakernel.source() == source()
    assert megakernel.BUSY_BYTES is busy
    assert megakernel.PARTS is parts
    assert megakernel.source is source


def test_limits_replace_what_the_source_waits_with() -> None:
    text = megakernel.source()
    with changed(8, {}, NO_FLAGS + NO_WEIGHTS):
        edited = megakernel.source()
        assert all(old not in edited or old in new for old, new in NO_FLAGS + NO_WEIGHTS)
    assert megakernel.source() == text


def test_a_constant_or_a_text_that_does_not_exist_ends_the_bench() -> None:
    with pytest.raises(SystemExit, match="SLEEP is no constant"):
        constants_of("SLEEP=3")
    with pytest.raises(SystemExit, match="has no 'not in it'"), changed(8, {}, (("not in it", ""),)):
        pass
