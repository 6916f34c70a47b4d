"""Programs in the answers of chat models."""

import pytest

from lakh.evals.generation.chat import program_of_answer

PROMPT = """from typing import List


def double(numbers: List[int]) -> List[int]:
    \"\"\" Each number times two. \"\"\"
"""
WHOLE = PROMPT + "    return [2 * number for number in numbers]\n"
DEFINITION = "def double(numbers: List[int]) -> List[int]:\n    return [2 * number for number in numbers]\n"
BODY = "return [2 * number for number in numbers]\n"
ANSWERS = {
    "a block": f"Sure!\n```python\n{WHOLE}```\nThat is it.",
    "nothing else": WHOLE,
    "reasoning first": f"<think>\n```python\ndef double(numbers): pass\n```\nNo.\n</think>\n```python\n{WHOLE}```",
    "reasoning whose start the template wrote": f"hm, ```x``` it is\n</think>\n\n```python\n{WHOLE}```",
    "a shell block first": f"```bash\npip install numpy\n```\nthen\n```python\n{WHOLE}```",
    "an example last": f"```python\n{WHOLE}```\nUse it:\n```python\nprint(double([1]))\n```",
    "a correction last": f"```python\ndef double(numbers): pass\n```\nOops:\n```python\n{WHOLE}```",
    "an indented fence": "1. Here:\n   ```python\n" + "".join(f"   {line}\n" for line in WHOLE.split("\n")) + "   ```",
    "tildes": f"~~~py\n{WHOLE}~~~",
    "no language": f"```\n{WHOLE}```",
    "no end": f"```python\n{WHOLE}",
    "without imports": f"```python\n{DEFINITION}```",
    "a body": f"```python\n{BODY}```",
    "an indented body": f"```python\n    {BODY}```",
    "a body without a fence": f"    {BODY}",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_program_is_found_in_every_form_of_answer(answer: str) -> None:
    names: dict[str, object] = {}
    exec(program_of_answer(answer, PROMPT, "double"), names)
    assert names["double"]([1, 2]) == [2, 4]


def test_an_answer_that_was_cut_off_while_reasoning_has_no_program() -> None:
    assert "pass" not in program_of_answer("<think>maybe `def double(numbers): pass`", PROMPT, "double")


def test_blocks_of_other_languages_are_taken_by_their_name() -> None:
    answer = "```sh\nnode x.js\n```\n```js\nfunction add(a, b) { return a + b; }\n```"
    assert program_of_answer(answer, "", "add", "javascript") == "function add(a, b) { return a + b; }\n"
    assert program_of_answer("```bash\necho 1\n```", "#!/bin/bash\nadd() {\n", "add", "sh") == "echo 1\n"
    prompt = "#include<assert.h>\n#include <vector>\nlong add(long a) {\n"
    program = program_of_answer("```cpp\n#include <vector>\nlong add(long a) {}\n```", prompt, "add", "cpp")
    assert program == "#include<assert.h>\n#include <vector>\nlong add(long a) {}\n"
    assert program_of_answer("```python\nx = 1\ny = 2\n```", "task", "") == "x = 1\ny = 2\n"
