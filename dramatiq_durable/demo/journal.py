"""What really happened, in the jobs' own words.

An append-only file that knows nothing of the record: one line, one write for each begin and end.  A process that is
killed right after a write has written it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Journal", "Reader", "Run"]


class Journal:
    """The writing side.

    Parameters:
      path(Path): The file; processes may share it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def boot(self, launch: str) -> None:
        """A worker process is up; *launch* tells the supervisor which one."""
        self._write({"event": "boot", "launch": launch})

    def begin(self, job: str) -> str:
        """An actor begins.

        Returns:
          str: What :meth:`end` wants to know.
        """
        run = uuid.uuid4().hex
        self._write({"event": "begin", "job": job, "run": run, "wall": time.time_ns() // 1_000_000})
        return run

    def end(self, run: str, *, done: bool) -> None:
        """An actor returned, or raised."""
        self._write({"event": "end", "run": run, "done": done})

    def _write(self, fields: dict[str, Any]) -> None:
        # The monotonic clock is the same for all processes of a machine, and nobody can set it.
        line = json.dumps({**fields, "pid": os.getpid(), "at": time.monotonic()}) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


class Run:
    """One run of a job, as far as it has been read."""

    __slots__ = ("began", "done", "ended", "job", "pid", "wall")

    def __init__(self, job: str, pid: int, began: float, wall: int) -> None:
        self.job = job
        self.pid = pid
        self.began = began
        self.wall = wall
        self.ended: float | None = None
        self.done = False


class Overlap(NamedTuple):
    """Two runs of one job at the same time."""

    job: str
    first: Run
    second: Run


class Reader:
    """The reading side: follows the file, and draws the conclusions.

    Attributes:
      boots(dict): The process id of each launch.
      done(set): The jobs that have run to their end.
      runs(dict): All runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.boots: dict[str, int] = {}
        self.done: set[str] = set()
        self.runs: dict[str, Run] = {}

    def read(self) -> None:
        """Take in what was written since the last time."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "boot":
                self.boots[line["launch"]] = line["pid"]
            case "begin":
                self.runs[line["run"]] = Run(line["job"], line["pid"], line["at"], line["wall"])
            case "end":
                run = self.runs[line["run"]]
                run.ended, run.done = line["at"], line["done"]
                if run.done:
                    self.done.add(run.job)

    def running(self, pid: int) -> int:
        """How many jobs a process is running."""
        return sum(run.ended is None and run.pid == pid for run in self.runs.values())

    def overlaps(self, deaths: Mapping[int, float]) -> list[Overlap]:
        """The runs of one job that overlapped.  A run without an end lasted until its process died.

        Parameters:
          deaths(Mapping): When each dead process died, by the same clock.
        """
        of_job: defaultdict[str, list[Run]] = defaultdict(list)
        for run in self.runs.values():
            of_job[run.job].append(run)
        found = []
        for job, runs in of_job.items():
            longest: Run | None = None
            for run in sorted(runs, key=lambda run: run.began):
                if longest is not None and run.began < _end(longest, deaths):
                    found.append(Overlap(job, longest, run))
                if longest is None or _end(run, deaths) > _end(longest, deaths):
                    longest = run
        return found

    def repeats(self, finished: Mapping[str, int]) -> list[str]:
        """The jobs that began once more after they were finished.

        Parameters:
          finished(Mapping): When each job was finished according to the record (epoch milliseconds).
        """
        late = {run.job for run in self.runs.values() if run.wall > finished.get(run.job, run.wall) + 1}
        return sorted(late)


def _end(run: Run, deaths: Mapping[int, float]) -> float:
    return run.ended if run.ended is not None else deaths.get(run.pid, float("inf"))
