"""Many processes at one record."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from dramatiq_durable.store import jobs, migrate, reading
from dramatiq_durable.store.database import Database, connect
from tests.servers import die_with_parent
from tests.store.rows import new


def together(*arguments: list[str]) -> list[Any]:
    """Start a process for each list of arguments, let them go at once, and return what they print."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.store.claimer", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        for given in arguments
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(answer) for answer in answers]


def test_eight_threads_in_two_processes_claim_every_job_once(db: Database, record_url: str) -> None:
    number = 400
    jobs.record_many(db, [new(f"job-{i}") for i in range(number)])

    answers = together(*[[record_url, owner, "8", str(number)] for owner in ("w1", "w2")])

    # None is lost, and none is granted twice
    granted = [tuple(pair) for answer in answers for pair in answer]
    assert sorted(granted) == sorted((f"job-{i}", 1) for i in range(number))
    assert reading.counts(db) == {"active": number}


def test_of_four_processes_that_migrate_at_once_one_does_it(database_url: str) -> None:
    answers = together(*[[database_url]] * 4)

    applied = sorted(answer for answer in answers if answer)
    db = connect(database_url)
    assert (applied, migrate.check(db)) == ([migrate.applied(db)], [])
    assert reading.counts(db) == {}
    db.close_all()
