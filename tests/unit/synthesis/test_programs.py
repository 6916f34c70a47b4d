from __future__ import annotations

import pytest

from lakh.evals.sandbox import Sandbox
from lakh.synthesis.programs import SynthesizedProgram, UnusableAnswer, program_from
from lakh.synthesis.prompts import KINDS, TOPICS, prompt_of

CODE = "def add(a, b):\n    return a + b\n\n\n"
TESTS = "def test_small():\n    assert add(1, 2) == 3\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"


def test_program_and_tests_are_recognised() -> None:
    program = program_from('"""Sums."""\n\n' + CODE + TESTS)
    assert isinstance(program, SynthesizedProgram)
    assert program.tests == ("test_small", "test_zero")


def test_unfinished_end_is_cut() -> None:
    program = program_from(CODE + TESTS + "\n\ndef test_more():\n    assert add(1,")
    assert isinstance(program, SynthesizedProgram)
    assert program.text == CODE + TESTS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(((((", "syntax"),
        ("", "no-code"),
        ("x = 1\n", "no-code"),
        (TESTS, "no-code"),
        (CODE, "no-tests"),
        (CODE + "def test_a():\n    assert True\n\n\ndef test_b():\n    assert True\n", "no-tests"),
        (CODE + "def test_a():\n    add(1, 2)\n\n\ndef test_b():\n    add(1, 2)\n", "no-tests"),
        (CODE + TESTS.replace("()", "(x)"), "no-tests"),
    ],
)
def test_unusable_answers_have_a_reason(text: str, reason: str) -> None:
    found = program_from(text)
    assert isinstance(found, UnusableAnswer)
    assert found.reason == reason


@pytest.mark.slow
def test_sandbox_passes_right_programs_and_the_control_finds_tests_that_check_nothing() -> None:
    wrong = TESTS.replace("== 3", "== 4")
    nothing = "".join(f"def test_{n}():\n    assert add(1, 2) != {n + 7}\n\n\n" for n in range(2))
    leaves = CODE + "import os\nos._exit(0)\n" + TESTS
    with Sandbox.choose(unsafe=True) as sandbox:  # isolation has tests of its own
        for text, passes, fails_control in (
            (CODE + TESTS, True, True),
            (CODE + wrong, False, True),
            (CODE + nothing, True, False),
            (leaves, False, True),
        ):
            program = program_from(text)
            assert isinstance(program, SynthesizedProgram)
            assert sandbox.run(program.to_run()).passed is passes
            assert (not sandbox.run(program.control()).passed) is fails_control


def test_prompts_go_through_all_topics_and_kinds() -> None:
    made = {prompt_of(number, TOPICS) for number in range(len(TOPICS) * len(KINDS))}
    assert len(made) == len(TOPICS) * len(KINDS)
    assert prompt_of(len(TOPICS) * len(KINDS), TOPICS) == prompt_of(0, TOPICS)
