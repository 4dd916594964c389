"""The command line itself: help that teaches, one-line errors, documented exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
from cedar.cluster.errors import ClusterNotFound, ConfigError, LaunchError, NameTaken, PortInUse
from cedar.ops import cli, exits
from cedar.ops.exits import CommandError, Exit


def all_parsers(
    parser: argparse.ArgumentParser, name: str = "cedar"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                yield from all_parsers(inner, f"{name} {verb}")


PARSERS = dict(all_parsers(cli.build_parser()))


def test_every_verb_of_the_readme_is_there() -> None:
    assert {
        "cedar serve",
        "cedar generate",
        "cedar status",
        "cedar stop",
        "cedar model inspect",
        "cedar model verify",
        "cedar config show",
        "cedar config check",
        "cedar config schema",
        "cedar demo",
    } <= set(PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_help_describes_every_option(name: str) -> None:
    parser = PARSERS[name]
    parser.format_help()
    wordless = [action.dest for action in parser._actions if action.option_strings and not action.help]
    assert not wordless


@pytest.mark.parametrize("verb", ["serve", "generate", "status", "stop", "model", "config"])
def test_help_has_examples_that_parse(verb: str) -> None:
    epilog = PARSERS[f"cedar {verb}"].epilog or ""
    lines = [line.strip() for line in epilog.splitlines() if line.strip().startswith("cedar ")]
    assert lines
    for line in lines:
        command = line.split("   ")[0].split(" | ")[0].split(" > ")[0]
        import shlex

        cli.build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from cedar.ops import cli; cli.build_parser().format_help();"
        "print([m for m in ('torch', 'ray', 'grpc', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("no", Exit.BUSY), 4),
        (ConfigError("gateway.prot: unknown key"), 2),
        (PortInUse("127.0.0.1", 1), 2),
        (NameTaken("default", 1), 2),
        (LaunchError("ray", "did not start"), 1),
        (ClusterNotFound("no cluster runs here"), 3),
        (FileNotFoundError(2, "No such file or directory", "cat.png"), 2),
        (KeyboardInterrupt(), 130),
        (SystemExit(15), 130),
    ],
)
def test_known_errors_become_one_line_and_a_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: argparse.Namespace) -> Exit:
        raise error

    monkeypatch.setattr("cedar.ops.commands.stop.run", fail)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # main() returns, whatever is imported
    assert cli.main(["stop"]) == code
    written = capsys.readouterr().err
    assert written.startswith("cedar: ")
    assert written.count("\n") == 1
    with pytest.raises(type(error)):
        cli.main(["--debug", "stop"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: argparse.Namespace) -> Exit:
        raise ValueError("a plain ValueError is nobody's message to the user")

    monkeypatch.setattr("cedar.ops.commands.stop.run", fail)
    with pytest.raises(ValueError, match="nobody"):
        cli.main(["stop"])


def test_exit_codes_are_documented() -> None:
    for code in Exit:
        assert f"\n{code.value} " in (exits.__doc__ or ""), code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "check", "lcal-cpu"], "did you mean 'local-cpu'"),
        (["config", "show", "local-cpu", "--set", "gateway.prot=1"], "did you mean 'port'"),
        (["config", "show", "local-cpu", "--set", "gateway.port=banana"], "gateway.port"),
        (["config", "check", "missing.yaml"], "missing.yaml"),
        (["config", "check", "local-cpu", "--set", "model.page_tokens=33"], "model.page_tokens: 33 (must be"),
        (["config", "check", "one-node-8gpu", "--set", "model.page_tokens=33"], "model.page_tokens: 33 "),
        (["config", "check", "local-cpu", "--set", "model.preset=x"], "model.preset: 'x'"),
        (["config", "check", "local-cpu", "--set", "model.path=/"], "model.path: / "),
        (
            ["serve", "-c", "local-cpu", "--quiet", "--set", "gateway.port=0", "--set", "model.path=/none"],
            "--set model.path=",
        ),
        (["serve", "-c", "nothing"], "nothing"),
        (["generate", "hello", "--image", "missing.png"], "missing.png"),
        (["generate", "hello", "--raw", "--system", "x"], "--raw"),
        (["model", "inspect", "no-such-folder"], "no-such-folder"),
        (["status", "--watch", "0"], "--watch"),
        (["status"], "cedar serve"),
        (["stop", "--cluster", "../x"], "../x"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path_factory.mktemp("state")))
    assert cli.main(arguments) in (2, 3)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--max-tokens=0", "--top-k=-3", "--seed=-1", f"--seed={1 << 64}", "--logprobs=-1", f"--top-k={1 << 32}",
     "--timeout=0", "--timeout=nan", "--timeout=soon", "--seed=x"],
)  # fmt: skip
def test_numbers_that_no_request_can_carry(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["generate", "hello", option])
    assert left.value.code == 2
    assert f"argument {option.split('=')[0]}" in capsys.readouterr().err


def test_config_show_is_a_file_that_check_accepts(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert cli.main(["config", "show", "local-cpu"]) == 0
    path = tmp_path_factory.mktemp("config") / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    assert cli.main(["config", "check", str(path)]) == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "local-cpu: valid\n"),
        (["model.path=/none"], "local-cpu: valid, but no checkpoint at /none (model.path) on this machine\n"),
        (['model.path=""'], "local-cpu: valid, but no checkpoint named (model.path is empty)\n"),
    ],
)
def test_config_check_says_what_it_could_not_judge(
    overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for override in overrides for word in ("--set", override)]
    assert cli.main(["config", "check", "local-cpu", *settings]) == 0
    assert capsys.readouterr().out == said


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert cli.main(["config", "schema"]) == 0
    assert "gateway" in json.loads(capsys.readouterr().out)["properties"]
    assert cli.main(["config", "schema", "--markdown"]) == 0
    assert "`gateway.port`" in capsys.readouterr().out
    assert cli.main(["config", "show"]) == 0
    assert "local-cpu" in capsys.readouterr().out.split()


def test_output_to_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m cedar.ops.cli config schema --markdown | head -1; exit ${{PIPESTATUS[0]}}"
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
