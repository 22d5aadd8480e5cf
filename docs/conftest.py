"""The Python snippets of these pages are tests: each page is one story, run in a directory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser


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


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], pattern="**/*.md", setup=_enter, teardown=_leave
).pytest()
