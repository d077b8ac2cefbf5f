"""The commands: their answers to bad arguments, and a short run of the demo."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from thunder_fn import demo
from thunder_fn.__main__ import COMMANDS, main
from thunder_fn.commands import run_command


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("thunder_fn: there is no command 'train'\n\nusage: python -m thunder_fn")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--seed", "-1"], "--seed must be from 0 to 2**63 - 1, not -1"),
        (["--out", __file__], f"--out {__file__}: File exists"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *argv])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"python -m thunder_fn demo: error: {message}\n")


def test_commands_pass_their_arguments_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "nothing"])
    assert stopped.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("python -m thunder_fn benchmarks: error: there is no benchmark 'nothing'; there are call, ")
    )


def test_a_reader_that_stops_reading_ends_a_command_quietly() -> None:
    """Run `python -m thunder_fn demo | head -1`."""
    code = """
        import sys
        from thunder_fn.commands import run_command
        sys.exit(run_command(lambda argv: [print("line", flush=True) for _ in range(100_000)] and 0, []))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_interrupted_command(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    assert run_command(interrupted, []) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("with_extras", [True, False])
def test_short_run(
    with_extras: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LAYERS", 2)
    if not with_extras:
        for name in ("rich.progress", "matplotlib"):
            monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo", "--steps", "4", "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "def loss(v0, ..., v29):" in printed and "GPT_backward" in printed
    assert "first 4 losses: equal" in printed
    assert ("`pip install matplotlib`" in printed) != with_extras
    assert ("`pip install rich`" in printed) != with_extras
    assert (tmp_path / "new" / "loss.png").exists() == with_extras


def test_text_is_printable_and_the_same_each_time() -> None:
    text = demo.read_text()
    assert torch.equal(text, demo.read_text()) and int(text.min()) >= 0 and int(text.max()) < len(demo.ALPHABET)
    assert "import" in demo.as_text(text[:100_000].tolist())


# ---- every command ----


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_unknown_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code in ((["--help"], 0), (["--no-such-option"], 2)):
        with pytest.raises(SystemExit) as stopped:
            main([name, *argv])
        assert stopped.value.code == code
        said = capsys.readouterr()
        assert (said.err if code else said.out).startswith(f"usage: python -m thunder_fn {name} ")


def test_no_bug_has_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["laws", "no such word"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("error: no bug's description has one of the words no such word\n")


def test_a_result_that_cannot_be_written_is_known_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["benchmarks", "trace", "--json", __file__])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument --json: {__file__}: File exists\n")


def test_each_law_is_listed_with_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, ["laws", "--list"]) == 0
    laws = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(laws) > 100 and not [line for line in laws if line.rstrip().endswith(":")]


def test_a_command_says_which_extra_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("", ".strategies", ".mutations"):
        monkeypatch.delitem(sys.modules, f"thunder_fn.testing{name}", raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert run_command(main, ["laws", "--list"]) == 1
    assert re.sub("\nfrom: .*", "", capsys.readouterr().err) == (
        "thunder_fn.testing needs hypothesis, which is not installed\n"
        'Install it with `pip install "thunder_fn[testing]"`.\n'
    )
