"""No attack passes, and none changes the verdict of the honest program after it: as root, as an ordinary user, outside
a virtual environment, and in other languages.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

import pytest
from bench.eval.attacks.suite import LANGUAGES, SCRIPTS, AttackSuite, attack_suite, failures
from bench.eval.attacks.table import WAYS, attack_table

from lakh.errors import UserError
from lakh.evals.sandbox import CommandProgram, Sandbox, SandboxLimits, SandboxVerdict
from lakh.evals.sandbox.backends.none import NoIsolation
from lakh.evals.tasks import multipl_e
from lakh.evals.tasks.multilingual import TOOL_FOLDERS


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def isolated(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        chosen = Sandbox.choose(backend=request.param)
    except UserError as error:
        pytest.skip(str(error))
    with chosen:
        yield chosen


QUICK = 12  # of each kind in every run; all of them in slow ones


def some_of(suite: AttackSuite) -> AttackSuite:
    """Other attacks on other days, the same within one."""
    names = random.Random(date.today().toordinal()).sample(sorted(suite.attacks), min(QUICK, len(suite.attacks)))
    return replace(suite, attacks={name: suite.attacks[name] for name in names})


def some_scripts() -> list[str]:
    """Likewise."""
    return random.Random(date.today().toordinal()).sample(SCRIPTS, 3)


def test_there_are_a_hundred_in_python_and_twenty_in_most_languages() -> None:
    assert len(attack_suite("python").attacks) > 100
    assert len(attack_suite("sh").attacks) > 20


def test_some_attacks_neither_pass_nor_spoil_the_next_verdict(isolated: Sandbox) -> None:
    assert failures(isolated, some_of(attack_suite("python")), honest_after_each=True) == {}


@pytest.mark.slow
def test_no_attack_passes_or_spoils_the_next_verdict(isolated: Sandbox) -> None:
    assert failures(isolated, attack_suite("python"), honest_after_each=True) == {}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change its uid; the others run as a user then")


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_no_attack_outside_a_virtual_environment_passes(backend: str, way: str) -> None:
    attacked("python", backend, way)


def attacked(language: str, backend: str, way: str, scripts: Sequence[str] = SCRIPTS) -> None:
    try:
        Sandbox.choose(backend=backend).stop()
    except UserError as error:
        pytest.skip(str(error))
    found: list[str] = []
    (row,) = attack_table([language], [backend], found.append, ways=[way], scripts=scripts)
    if (row["note"] and "is not installed in" in str(row["note"])) or "runs in the sandbox from" in str(row["note"]):
        pytest.skip(str(row["note"]))
    assert row["attacks"], row["note"]
    assert row["got_through"] == 0, found
    if way == "user, bare":
        assert "user" in str(row["note"]) or "same uid" in str(row["note"])


SLOW = {"cpp", "go", "java", "r", "rs", "ts"}  # compilers, and an interpreter that starts slowly


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LANGUAGES]
)
def test_no_attack_in_another_language_passes(sandbox: Sandbox, language: str) -> None:
    try:
        suite = attack_suite(language, scripts=())
    except UserError as error:
        pytest.skip(str(error))
    if suite.attacks:  # TypeScript has those that scripts make, and no others
        assert failures(sandbox, suite, honest_after_each=False) == {}


def test_no_script_that_a_program_starts_makes_it_pass(sandbox: Sandbox) -> None:
    suite = some_of(attack_suite("sh"))
    assert failures(sandbox, suite, honest_after_each=False) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # Java compiles and runs 50 programs, and has to end on a machine that is ten times slower
@needs_root
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_attack_of_an_ordinary_user_in_another_language_passes(language: str) -> None:
    # A script is the same whoever starts it: all of them from a shell, some from every other language. What needs a
    # compiler takes minutes, and the test above attacks in all of these languages: here in two of them a day.
    if language in SLOW and language not in random.Random(date.today().toordinal()).sample(sorted(SLOW), 2):
        pytest.skip("attacked on another day; lakh bench eval --attacks attacks in all languages every time")
    attacked(language, "bubblewrap", "user, bare", SCRIPTS if language == "sh" else some_scripts())


def test_every_language_that_is_installed_is_attacked() -> None:
    installed = {
        name
        for name, language in multipl_e.table().items()
        if all(shutil.which(tool, path=TOOL_FOLDERS) for tool in language.tools)
    }
    assert installed <= set(LANGUAGES)


@pytest.mark.parametrize("chance", [0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
def test_a_program_that_decides_by_a_checksum_of_its_test_hardly_ever_passes(chance: float) -> None:
    """Such a program prints the nonce or not; it cannot tell changed tests and parts of the test from the test."""

    class Deciding(Sandbox):
        def _run_once(self, program: object, limits: SandboxLimits) -> SandboxVerdict:
            assert isinstance(program, CommandProgram)
            decides = random.Random(f"{trial} {program.files}").random() < chance
            return SandboxVerdict("passed" if decides else "failed")

    def files(text: str, count: int) -> tuple[dict[str, str], ...]:
        return tuple({"main.js": f"{text} {number}"} for number in range(count))

    program = CommandProgram({"main.js": "test"}, (("node",),), controls=files("changed", 8), parts=files("part", 24))
    sandbox, passed, trials = Deciding(NoIsolation()), 0, range(1000)
    for trial in trials:  # noqa: B007 - read by the method above
        passed += sandbox.run(program).passed
    assert passed / len(trials) < 0.035


def test_an_honest_program_passes_the_second_look() -> None:
    class Honest(Sandbox):
        def _run_once(self, program: object, limits: SandboxLimits) -> SandboxVerdict:
            assert isinstance(program, CommandProgram)
            return SandboxVerdict("failed" if program.files["x"] in BAD else "passed")

    some_changes_do_not_matter = tuple({"x": text} for text in ("c1", "c2", "c3", "c4", "c5", "c6"))
    program = CommandProgram({"x": "t"}, (), controls=some_changes_do_not_matter, parts=({"x": "p1"}, {"x": "p2"}))
    for bad, kind in ((("c2", "c4", "c6"), "passed"), (("c2", "c4"), "failed"), (("c1", "c2", "c3", "p2"), "failed")):
        BAD[:] = bad
        assert Honest(NoIsolation()).run(program).kind == kind


BAD: list[str] = []
