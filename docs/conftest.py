"""The snippets of these pages are tests: each page is one story, run in a directory of its own.

Python fences are executed.  Console fences are typed: after each line that begins with ``$`` stands what the command
really prints, with ``...`` for lines left out; ids, times and process numbers may differ.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.example import SybilFailure
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).parents[1]

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

#: What differs from run to run, as it looks in any run.
VARIES = [UUID, r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", r"worker [0-9a-f]{8}", r"\b[\d.]+ (?:ms|s|min|h)\b"]
VARIES += [r"worker +[0-9a-f]{8}"]
_VARIES = re.compile("|".join(f"({pattern})" for pattern in VARIES) + r"|(\.\.\.)|(\s+)")


def _pattern(shown: str) -> str:
    """Make a regular expression of what a page shows."""
    parts, end = [], 0
    for match in _VARIES.finditer(shown.strip()):
        parts.append(re.escape(shown.strip()[end : match.start()]))
        kind = match.lastindex or 0
        if kind == 1:
            parts.append(f"({UUID})")
        elif kind <= len(VARIES):
            parts.append(VARIES[kind - 1].replace(" ", r"\s+"))
        else:
            parts.append(".*?" if kind == len(VARIES) + 1 else r"\s+")
        end = match.end()
    return "".join([*parts, re.escape(shown.strip()[end:])])


def _type(example: Example) -> str | None:
    """Run the commands of a console fence and compare what they print; return what is wrong."""
    ids: dict[str, str] = example.namespace.setdefault("_ids", {})
    for block in re.split(r"^\$ ", example.parsed, flags=re.M)[1:]:
        line, _, shown = block.partition("\n")
        words = [ids.get(word, word) for word in shlex.split(line)]
        if words[0] != "dramatiq-durable":
            return f"only dramatiq-durable can be typed here, not {words[0]!r}"
        done = subprocess.run(
            [sys.executable, "-m", "dramatiq_durable", *words[1:]],
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "88", "TZ": "UTC"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        printed = done.stdout + done.stderr
        match = re.fullmatch(_pattern(shown), printed.strip(), re.S)
        if match is None:
            return f"$ {line}\nprints\n{printed}"
        ids.update(zip(re.findall(UUID, shown), match.groups(), strict=True))
    return None


def _enter(namespace: dict[str, Any]) -> None:
    namespace["_home"], namespace["_room"] = os.getcwd(), tempfile.mkdtemp(prefix="durable-docs-")
    os.chdir(namespace["_room"])


def _leave(namespace: dict[str, Any]) -> None:
    for value in list(namespace.values()):
        durable = getattr(value, "__dict__", {}).get("durable")
        if durable is not None and hasattr(durable, "uninstall"):
            durable.uninstall()
    os.chdir(namespace["_home"])
    shutil.rmtree(namespace["_room"], ignore_errors=True)


SYBIL = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="console", evaluator=_type)],
    patterns=["*.md", "**/*.md"],
    excludes=["_build/**"],
)


class Page(pytest.File):
    """A page of the documentation."""

    def collect(self) -> Iterator[pytest.Item]:
        if next(iter(SYBIL.parse(self.path).examples()), None) is not None:
            yield Story.from_parent(self, name="story")


class Story(pytest.Item):
    """The snippets of a page, in their order: one test, so that one process runs them all."""

    def runtest(self) -> None:
        document = SYBIL.parse(self.path)
        _enter(document.namespace)
        try:
            for example in document.examples():
                example.evaluate()
        finally:
            _leave(document.namespace)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, SybilFailure) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.path.name


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return Page.from_parent(parent, path=file_path) if SYBIL.should_parse(file_path) else None
