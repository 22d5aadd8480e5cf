from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dramatiq_durable.demo.journal import Journal, Reader

INFINITE = float("inf")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def write(path: Path, *runs: tuple[str, int, float, float | None]) -> Reader:
    """Write runs as (job, process, begin, end)."""
    lines = []
    for number, (job, pid, began, ended) in enumerate(runs):
        run = {"run": str(number), "pid": pid}
        lines.append({"event": "begin", "job": job, "at": began, "wall": int(began * 1000), **run})
        if ended is not None:
            lines.append({"event": "end", "at": ended, "done": True, **run})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = Reader(path)
    reader.read()
    return reader


def test_what_a_process_writes_is_read_back(path: Path) -> None:
    # Given a process that boots and runs two jobs, one of which fails
    journal = Journal(path)
    journal.boot("1")
    journal.end(journal.begin("good"), done=True)
    journal.end(journal.begin("bad"), done=False)
    journal.begin("open")

    # When it is read
    reader = Reader(path)
    reader.read()

    # Then all of it is there
    assert reader.boots == {"1": os.getpid()}
    assert reader.done == {"good"}
    assert [run.job for run in reader.runs.values()] == ["good", "bad", "open"]
    assert reader.running(os.getpid()) == 1


def test_a_line_that_is_not_finished_is_read_later(path: Path) -> None:
    reader = write(path, ("a", 1, 0, 1))
    whole = (
        path.read_text() + json.dumps({"event": "begin", "job": "b", "run": "x", "pid": 1, "at": 2, "wall": 2}) + "\n"
    )

    path.write_text(whole[:-10])
    reader.read()
    assert len(reader.runs) == 1

    path.write_text(whole)
    reader.read()
    assert len(reader.runs) == 2


@pytest.mark.parametrize(
    ("runs", "deaths", "overlaps"),
    [
        # One after the other, also in two processes
        ([("a", 1, 0, 1), ("a", 2, 1, 2)], {}, 0),
        # Different jobs at once
        ([("a", 1, 0, 5), ("b", 1, 1, 2)], {}, 0),
        # At once: in two processes, or in two threads of one
        ([("a", 1, 0, 5), ("a", 2, 4, 6)], {}, 1),
        ([("a", 1, 0, 5), ("a", 1, 4, 6)], {}, 1),
        # A run of a killed process is over when it died, and not before
        ([("a", 1, 0, None), ("a", 2, 3, 4)], {1: 2.5}, 0),
        ([("a", 1, 0, None), ("a", 2, 3, 4)], {1: 3.5}, 1),
        # A run whose process is alive is not over
        ([("a", 1, 0, None), ("a", 2, 3, 4)], {}, 1),
        # The longest counts, not the last
        ([("a", 1, 0, 9), ("a", 2, 1, 2), ("a", 3, 3, 4)], {}, 2),
    ],
)
def test_runs_of_one_job_at_the_same_time_are_found(
    path: Path, runs: list[tuple[str, int, float, float | None]], deaths: dict[int, float], overlaps: int
) -> None:
    for order in (runs, runs[::-1]):
        assert len(write(path, *order).overlaps(deaths)) == overlaps


def test_a_job_that_begins_after_it_was_finished_is_found(path: Path) -> None:
    reader = write(path, ("a", 1, 0, 1), ("a", 2, 2, 3), ("b", 1, 0, 1), ("c", 1, 0, None))

    assert reader.repeats({"a": 1_000, "b": 1_000}) == ["a"]
    assert reader.repeats({"a": 3_000}) == []
