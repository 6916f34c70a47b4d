"""The bench of the megakernel: constants and texts that it replaces exist, and are back afterwards."""

import re

import pytest
import torch
from bench.decode.megakernel import MARKS, NO_FLAGS, NO_WEIGHTS, PHASES, changed, constants_of, phases

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


def test_each_phase_ends_once_and_in_order() -> None:
    with changed(8, {}, MARKS):
        text = megakernel.source()
    found = [int(number) for number in re.findall(r"^    MARK\((\d+)\)$", text, re.MULTILINE)]
    assert found == list(range(len(PHASES) + 1))


def test_phases_are_read_from_the_marks() -> None:
    layers, heads, blocks = 3, 4, 10
    values = torch.zeros(layers, heads, 48, 64, dtype=torch.bfloat16)
    marks = torch.zeros(layers, heads, 16 * 64 // 4, dtype=torch.int64)
    for layer in range(layers):
        for block in range(blocks):
            for phase in range(len(PHASES) + 1):
                marks[layer, block % heads, block // heads * 16 + phase] = layer * 1000 + phase * (10 + block)
    values[:, :, -16:] = marks.view(torch.bfloat16).unflatten(2, (16, 64))
    rows = phases(values, blocks)
    assert rows[:-1] == [(name, 14.5, 10.0, 19.0) for name, *_ in PHASES]
    assert rows[-1] == ("a layer", 1000.0, 1000.0, 1000.0)


def test_a_constant_or_a_text_that_does_not_exist_ends_the_bench() -> None:
    with pytest.raises(SystemExit, match="SLEEP is no constant"):
        constants_of("SLEEP=3")
    with pytest.raises(SystemExit, match="has no 'not in it'"), changed(8, {}, (("not in it", ""),)):
        pass
