from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dramatiq_durable
from tests.servers import wait_until

HOME = Path(dramatiq_durable.__file__).parents[1]


class Demo:
    """The demo in a process of its own, which keeps its temporary files in a directory of ours."""

    def __init__(self, room: Path, *args: str) -> None:
        self.temporary = room / "temporary"
        self.temporary.mkdir()
        (room / ".env").write_text("DRAMATIQ_DURABLE_POOL_SIZE=nonsense\n")
        self.out, self.err = room / "out", room / "err"
        path = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dramatiq_durable", "demo", *args],
                cwd=room,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.temporary), "DRAMATIQ_DURABLE_LEASE": "x"},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def left_running(self) -> list[str]:
        """The processes that work in its directory."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if Path(os.readlink(process / "cwd")).is_relative_to(self.temporary):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.process.kill()
        demo.process.wait()


def start(demos: list[Demo], tmp_path: Path, *args: str) -> Demo:
    demos.append(Demo(tmp_path, *args))
    return demos[-1]


def test_no_job_is_lost_and_none_runs_twice_at_once(demos: list[Demo], tmp_path: Path) -> None:
    # When the demo is played
    demo = start(demos, tmp_path, "--json")
    code = demo.process.wait(150)

    # Then it says that every promise was kept, in one object
    report = json.loads(demo.out.read_text())
    assert (code, demo.err.read_text()) == (0, "")
    assert report["sent"] == report["completed"] >= 300
    assert (report["lost"], report["concurrent_runs"], report["repeated"], report["culprits"]) == (0, 0, 0, [])

    # And that enough was done to break them
    assert report["worker_kills"] >= 4 and report["broker_flushes"] >= 2 and report["broker_kills"] >= 1
    assert report["put_back"] > 0 and report["taken_over"] > 0
    assert report["reconciled"] == report["put_back"] + report["taken_over"]
    assert report["attempts"] > report["sent"]

    # And nothing is left of it
    assert demo.left_running() == []
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_it_is_stopped_half_way(demos: list[Demo], tmp_path: Path, number: signal.Signals) -> None:
    # Given a demo in the midst of it
    demo = start(demos, tmp_path)
    wait_until(lambda: "FLUSHALL" in demo.out.read_text(), 60, "the demo is under way")
    assert demo.left_running() != []

    # When it is stopped, or killed
    demo.process.send_signal(number)
    code = demo.process.wait(30)

    # Then nothing is left of it
    assert code == (-number if number == signal.SIGKILL else 130)
    wait_until(lambda: not demo.left_running(), 30, "its processes are gone")
    wait_until(lambda: not list(demo.temporary.iterdir()), 10, "its files are gone")
    assert "Traceback" not in demo.err.read_text()


def test_a_lost_job_is_noticed(demos: list[Demo], tmp_path: Path) -> None:
    # Given a demo whose record loses rows that wait for their time, which no promise covers
    kept = tmp_path / "kept"
    demo = start(demos, tmp_path, "--json", "--keep", str(kept))
    database = kept / "jobs.sqlite3"

    def deleted() -> int:
        if not database.exists():
            return 0
        connection = sqlite3.connect(database, timeout=5)
        try:
            with connection:
                return connection.execute(
                    "DELETE FROM durable_jobs WHERE id IN (SELECT id FROM durable_jobs WHERE state = 'scheduled' AND "
                    "actor = 'later' LIMIT 3)"
                ).rowcount
        except sqlite3.OperationalError:
            return 0
        finally:
            connection.close()

    number = wait_until(deleted, 60, "rows are deleted")

    # When it has been played to its end
    code = demo.process.wait(170)

    # Then the journal has told, which knows nothing of the record
    report = json.loads(demo.out.read_text())
    assert (code, report["kept"]) == (1, False)
    assert report["lost"] == len(report["culprits"]) == number
    assert report["completed"] == report["sent"] - number

    # And what it left because it was asked to is there
    assert (kept / "journal").stat().st_size > 0
