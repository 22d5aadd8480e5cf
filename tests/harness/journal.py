"""What really happened, told by the jobs themselves: append-only lines, one write each, independent of our own "
"tables."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Event", "Journal"]


class Event(NamedTuple):
    """One line: what happened to which job, where, and when (monotonic, the same for all processes of this machine)."""

    event: str
    job: str
    pid: int
    at: float
    detail: Any = None


class Journal:
    """An append-only file.

    Parameters:
      path(Path)
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, event: str, job: str, detail: Any = None) -> None:
        """Write one line; a process that is killed right after has written it."""
        line = json.dumps([event, job, os.getpid(), time.monotonic(), detail]) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def events(self, event: str | None = None, job: str | None = None) -> list[Event]:
        """Return the lines, only those of one kind or job if asked."""
        if not self.path.exists():
            return []
        found = [Event(*json.loads(line)) for line in self.path.read_text().splitlines() if line.endswith("]")]
        return [e for e in found if event in (None, e.event) and job in (None, e.job)]

    def count(self, event: str, job: str | None = None) -> int:
        return len(self.events(event, job))

    def concurrent(self, deaths: dict[int, float]) -> list[str]:
        """Return the jobs that ran twice at once.  A run without an end lasted until its process died.

        Parameters:
          deaths(dict): When each killed process died (monotonic).
        """
        runs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        open_runs: dict[tuple[str, int], float] = {}
        for event in self.events():
            key = (event.job, event.pid)
            if event.event == "begin":
                open_runs[key] = event.at
            elif event.event == "end" and key in open_runs:
                runs[event.job].append((open_runs.pop(key), event.at))
        for (job, pid), began in open_runs.items():
            runs[job].append((began, deaths.get(pid, float("inf"))))
        twice = []
        for job, spans in runs.items():
            spans.sort()
            if any(left[1] > right[0] for left, right in zip(spans, spans[1:], strict=False)):
                twice.append(job)
        return twice
