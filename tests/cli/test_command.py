from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dramatiq_durable import __version__
from tests.cli.conftest import HOME, Command

COMMANDS = [("migrate",), ("status",), ("jobs", "list"), ("jobs", "show"), ("reconcile",)]


def test_the_command_says_what_it_is(command: Command) -> None:
    assert command("--version").out == f"dramatiq-durable {__version__}\n"
    for name in {name for name, *_ in COMMANDS}:
        assert name in command("--help").out


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_each_command_explains_itself_and_speaks_json(command: Command, name: tuple[str, ...]) -> None:
    answer = command(*name, "--help")

    assert answer.code == 0
    assert "--json" in answer.out
    assert max(len(line) for line in answer.out.splitlines()) <= 80


@pytest.mark.parametrize(
    "args", [("nonsense",), ("jobs", "show"), ("status", "--jsn"), ("jobs", "list", "--limit", "0"), ("migrate", "x")]
)
def test_what_it_does_not_understand_is_refused_with_exit_code_2(command: Command, args: tuple[str, ...]) -> None:
    answer = command(*args)

    assert (answer.code, answer.out) == (2, "")
    assert "Traceback" not in answer.err and "Usage:" in answer.err


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(missing: str) -> None:
    # Given a Python in which the library cannot be imported
    code = f"import sys; sys.modules[{missing!r}] = None; from dramatiq_durable.cli import main; main()"

    # When the command is run
    done = subprocess.run([sys.executable, "-c", code, "status"], capture_output=True, text=True, timeout=60)

    # Then it says how to install it
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith('pip install "dramatiq-durable[cli]"')


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://app:hunter2@127.0.0.1:1/jobs", "does not answer"),
        ("mysql://app:hunter2@db/jobs", "begins with 'mysql://'"),
        ("hunter2", "begins with no scheme"),
        ("sqlite://hunter2", "three slashes"),
        ("postgresql://app:hun%zz2hunter2@h/jobs", "cannot be understood"),
        ("sqlite:///no/such/file", "There is no database at"),
        ("sqlite:///file", "not a database"),
        ("sqlite:///empty", "0001_initial pending"),
        ("", "must not be empty"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_sentence_without_the_password(
    command: Command, tmp_path: Path, url: str, sentence: str
) -> None:
    # Given a file that is no database, and one without tables
    (tmp_path / "file").write_text("neither SQLite nor anything else")
    (tmp_path / "empty").touch()

    # When a command is pointed at what cannot work
    answer = command("status", "--json", "--database-url", url)

    # Then it says why, in words, on stderr
    assert (answer.code, answer.out) == (2, "")
    assert sentence in answer.err
    assert "Traceback" not in answer.err and "hunter2" not in answer.err.replace("sqlite:///", "")


def test_a_missing_driver_is_named_with_the_extra_that_brings_it(command: Command, tmp_path: Path) -> None:
    # Given a Python whose psycopg cannot be imported
    (tmp_path / "psycopg.py").write_text("raise ImportError('no psycopg here')")
    path = os.pathsep.join([str(tmp_path), str(HOME)])

    answer = command("status", "--database-url", "postgresql://app:hunter2@db/jobs", env={"PYTHONPATH": path})

    assert (answer.code, answer.out) == (2, "")
    assert 'pip install "dramatiq-durable[postgres]"' in answer.err and "Traceback" not in answer.err


def test_the_database_comes_from_the_settings_if_it_is_not_given(command: Command, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DRAMATIQ_DURABLE_DATABASE_URL=sqlite:///from-file.sqlite3\n")

    assert command("migrate").code == 0
    assert command("status", "--json").json()["database"] == "sqlite:///from-file.sqlite3"
    environment = {"DRAMATIQ_DURABLE_DATABASE_URL": "sqlite:///from-environment.sqlite3"}
    assert "from-environment.sqlite3" in command("status", env=environment).err


def test_a_setting_that_makes_no_sense_is_a_sentence(command: Command) -> None:
    answer = command("status", env={"DRAMATIQ_DURABLE_LEASE": "60s"})

    assert (answer.code, answer.out) == (2, "")
    assert "lease must be a whole number of milliseconds, not '60s'." in answer.err
