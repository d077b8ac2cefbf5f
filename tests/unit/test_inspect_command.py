"""`python -m thunder_fn inspect`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from thunder_fn.__main__ import main

EXAMPLE = """
import torch

def f(x):
    return (x @ x.t()).relu()

def example():
    return f, (torch.ones(8, 8),)

def other():
    return torch.relu, (torch.ones(8, 8),)

def wrong():
    return 3

def needs(x):
    return x

def text():
    return torch.relu, ("no tensor",)

def missing():
    return f, ()
"""

SCRIPT = """
import sys
from thunder_fn.__main__ import script
sys.exit(script())
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "an_example_to_inspect.py"
    path.write_text(EXAMPLE)
    return path


def test_writes_a_page(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{file}:example"]) == 0
    assert capsys.readouterr().out.startswith("f.html (")
    assert Path("f.html").read_text().startswith("<!doctype html>")
    assert main(["inspect", "an_example_to_inspect:example", "--out", "page.html"]) == 0
    assert Path("page.html").exists()


@pytest.mark.parametrize("report", ["chain", "memory", "residuals", "cost"])
def test_prints_a_report(report: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{file}:example", "--report", report]) == 0
    text = capsys.readouterr().out
    assert "aten." in text or report == "chain"
    assert "\x1b[" not in text


def test_writes_a_chrome_trace(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{file}:example", "--chrome-trace", "run.json"]) == 0
    assert capsys.readouterr().out == "run.json\n" and Path("run.json").exists()


def test_measures_two_runs_on_one_page(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{file}:example", "--beside", f"{file}:other", "--measure", "--out", "both.html"]) == 0
    first, second, page = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"both\.1\.trace\.json \(a call of f takes [\d.]+ (µs|ms|s)\)", first)
    assert second.startswith("both.2.trace.json (a call of relu takes") and page.startswith("both.html (")
    events = json.loads(Path("both.1.trace.json").read_text())["traceEvents"]
    assert {"f", "aten::mm"} <= {event["name"] for event in events}
    assert "<title>example beside other" in Path("both.html").read_text()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nothing", "'nothing' names no function\nWrite FILE:FUNCTION, such as `model.py:example`."),
        ("none.py:f", "there is no file none.py\nGive the path of a Python file."),
        (
            "an_example_to_inspect.py:g",
            "an_example_to_inspect.py has no function 'g'\nIt has f, example, other, wrong, needs, text, missing.",
        ),
        (
            "an_example_to_inspect.py:wrong",
            "an_example_to_inspect.py:wrong returned an int\n"
            "Return (f, args) or (f, args, kwargs), where args is a tuple: `return f, (x,)`.",
        ),
        (
            "an_example_to_inspect.py:needs",
            "an_example_to_inspect.py:needs cannot be called without arguments: missing a required argument: 'x'\n"
            "It takes no argument and returns (f, args), the function and what it is called with.",
        ),
        (
            "no_such_module:f",
            "there is no module no_such_module\nOr give a path that ends in .py.",
        ),
    ],
)
def test_bad_arguments_have_a_message_and_no_stack_trace(
    where: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", where]) == 2
    assert capsys.readouterr().err == f"thunder_fn inspect: {message}\n"


@pytest.mark.parametrize(
    "given",
    [
        ["plan", "none.py:f"],
        ["plan", "an_example_to_inspect.py:g"],
        ["plan", "an_example_to_inspect.py:example", "--hardware", "h9"],
        ["plan", "an_example_to_inspect.py:example", "--world", "0"],
        ["compile", "an_example_to_inspect.py:g"],
        ["compile", "an_example_to_inspect.py:example"],
        ["compile", "an_example_to_inspect.py:example", "--recipe", "no-such-one"],
        ["inspect", "an_example_to_inspect.py:example", "--beside", "an_example_to_inspect.py:g"],
        ["explain", "NoSuchError"],
        ["laws", "--no-such-option"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_misuse_has_its_exit_code(given: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(given)
    except SystemExit as stopped:  # as argparse ends
        code = stopped.code
    said = capsys.readouterr()
    assert code == 2 and not said.out and "Traceback" not in said.err


@pytest.mark.parametrize("command", ["inspect", "plan"])
@pytest.mark.parametrize("example", ["text", "missing"])
def test_the_script_that_was_installed_is_no_users_line(
    command: str, example: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of a call that the command itself makes name no line: the next frame is that of `bin/thunder-fn`."""
    monkeypatch.setattr("sys.argv", ["thunder-fn", command, f"{file}:{example}"])
    with pytest.raises(SystemExit) as stopped:
        exec(compile(SCRIPT, "/somewhere/bin/thunder-fn", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().err
    assert stopped.value.code == 1 and said.startswith(f"thunder_fn {command}: ") and "thunder-fn:" not in said


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def f():\n    return {}['a']\n", ['  File "{path}", line 2, in f', "    return {{}}['a']", "KeyError: 'a'"]),
        (
            "import no_such_module\n",
            ['  File "{path}", line 1, in <module>', "ModuleNotFoundError: No module named 'no_such_module'"],
        ),
        ("def f(:\n", ['  File "{path}", line 1', "SyntaxError: invalid syntax"]),
        ("raise SystemExit(7)\n", ["SystemExit: 7"]),
    ],
    ids=["call", "import", "syntax", "exit"],
)
@pytest.mark.parametrize("command", ["inspect", "compile"])
def test_users_code_that_raises(
    command: str, text: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name = f"raises_{command}_{abs(hash(text))}"
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([command, f"{path}:f" if command == "inspect" else f"{name}:f"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"thunder_fn {command}: the code that it was given raises\n")
    assert all(line.format(path=path) in error for line in lines)
    assert "Traceback" not in error and "importlib" not in error and "thunder_fn/" not in error


def test_a_page_that_cannot_be_written(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{file}:example", "--out", "no_such_folder/page.html"]) == 1
    assert capsys.readouterr().err == (
        "thunder_fn inspect: no_such_folder/page.html cannot be written: No such file or directory\n"
    )
