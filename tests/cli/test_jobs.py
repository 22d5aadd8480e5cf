from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from dramatiq_durable.redact import describe
from dramatiq_durable.states import JobState
from dramatiq_durable.store import jobs, migrate, outcomes, recovery
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.types import Evidence, NewJob, Outcome, WorkerInfo
from tests.cli.conftest import Command

OWNER = "0123456789abcdef"


@pytest.fixture
def db(database_url: str) -> Any:
    db = connect(database_url)
    migrate.upgrade(db)
    yield db
    db.close_all()


def send(db: Database, number: int, **fields: Any) -> str:
    """Record a job as a sending process would."""
    id = f"5a000000-0000-4000-8000-{number:012d}"
    call = {"args": [number], "kwargs": {"topic": "tea", "api_key": "hunter2"}, "options": {}}
    message = {"queue_name": "default", "actor_name": "research", "message_id": id, "message_timestamp": 0, **call}
    job = NewJob(id=id, queue="default", actor="research", agent="research", payload=json.dumps(message).encode())
    assert jobs.record(db, job._replace(**fields)) == "recorded"
    return id


def run(db: Database, id: str, kind: str, **fields: Any) -> None:
    """Claim, start and settle a job as a worker would."""
    claimed = jobs.claim(db, OWNER, [id], 60_000)[0]
    assert jobs.start(db, OWNER, [(id, claimed.claim, "rerun", 0)], 60_000)
    assert outcomes.settle(db, OWNER, [Outcome(id, claimed.claim, kind, **fields)])


def broken() -> Evidence:
    try:
        raise ConnectionError("cannot log in to https://app:hunter2@api.example as \x1b[31mbob [bold]")
    except ConnectionError as e:
        return Evidence(*describe(e))


def test_status_counts_what_is_there(command: Command, db: Database, database_url: str) -> None:
    # Given jobs in several states, a worker and a reconciliation
    send(db, 1, broker_ref="1.1")
    send(db, 2, delay=60_000)
    send(db, 3, parked="no_row")
    run(db, send(db, 4, broker_ref="4.1"), "completed")
    recovery.enlist(db, WorkerInfo(OWNER, "host.example", 4711, 8, "default,mails"))
    recovery.note_pass(db, "reconcile", OWNER, looked=7, put_back=2)
    recovery.keep_undecodable(db, "default", b"\xff", "not JSON", None)

    # When somebody asks
    found = command("status", "--json", "--database-url", database_url).json()

    # Then all of it is there
    jobs_found = found["jobs"]
    assert list(jobs_found) == [state.value for state in JobState]
    assert {state: n for state, n in jobs_found.items() if n} == {
        "scheduled": 1,
        "queued": 1,
        "parked": 1,
        "completed": 1,
    }
    assert (found["held"], found["undecodable"]) == (1, 1)
    assert found["queues"][0]["queue"] == "default" and found["queues"][0]["queued"] == 1
    assert found["workers"][0]["host"] == "host.example"
    assert found["reconciliation"]["put_back_total"] == 2

    # And for people too, 80 columns wide
    shown = command("status", "--database-url", database_url).out
    assert "jobs list --state parked" in shown and "host.example" in shown and "7 waiting jobs compared" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_jobs_are_listed_newest_first_page_by_page(command: Command, db: Database, database_url: str) -> None:
    # Given more jobs than fit a page, whose ids do not grow with time
    sent = [send(db, number) for number in (5, 1, 4, 2, 3)]

    # When they are read page by page
    pages: list[list[str]] = []
    after: list[str] = []
    while not pages or after[1:]:
        found = command("jobs", "list", "--limit", "2", "--json", "--database-url", database_url, *after).json()
        pages.append([job["id"] for job in found["jobs"]])
        after = ["--after", found["next"]] if found["next"] else []

    # Then each is there once, and whole pages come in the order of their creation
    assert sorted(sum(pages, [])) == sorted(sent)
    assert [len(page) for page in pages] == [2, 2, 1]


def test_a_list_fits_80_columns_and_keeps_ids_whole(command: Command, db: Database, database_url: str) -> None:
    id = send(db, 1, actor="a_function_with_a_name_that_is_much_too_long")

    shown = command("jobs", "list", "--database-url", database_url).out

    assert id in shown and "queued" in shown and re.search(r"\b\d+ s$", shown, re.MULTILINE)
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert (
        "a_function_with_a_name_that_is_much_too_long"
        in command("jobs", "list", "--database-url", database_url, env={"COLUMNS": "140"}).out
    )


def test_a_list_can_be_narrowed(command: Command, db: Database, database_url: str) -> None:
    first, second, third = send(db, 1), send(db, 2, queue="mails"), send(db, 3, delay=60_000, actor="other")

    for option, value, expected in (
        ("--state", "scheduled", third),
        ("--queue", "mails", second),
        ("--actor", "other", third),
    ):
        found = command("jobs", "list", option, value, "--json", "--database-url", database_url).json()
        assert [job["id"] for job in found["jobs"]] == [expected]
    assert first not in command("jobs", "list", "--queue", "mails", "--database-url", database_url).out
    assert "No job matches." in command("jobs", "list", "--queue", "none", "--database-url", database_url).out


def test_unknown_ids_and_states_are_refused(command: Command, db: Database, database_url: str) -> None:
    for args, sentence in (
        (("jobs", "show", "nope"), "There is no job 'nope'"),
        (("jobs", "list", "--after", "nope"), "There is no job 'nope'"),
        (("jobs", "list", "--state", "sheduled"), "Did you mean scheduled?"),
    ):
        answer = command(*args, "--database-url", database_url)
        assert (answer.code, answer.out) == (2, "")
        assert sentence in answer.err and "Traceback" not in answer.err


def test_a_job_tells_its_story_and_keeps_its_secrets(command: Command, db: Database, database_url: str) -> None:
    # Given a job that failed once, was tried again, and failed for good
    recovery.enlist(db, WorkerInfo(OWNER, "host.example", 4711, 8, "default"))
    id = send(db, 1, broker_ref="1.1")
    run(db, id, "retry", reason="retry", evidence=broken())
    assert [due.id for due in recovery.take_due(db, 10)] == [id]
    run(db, id, "failed", reason="error", evidence=broken())

    # When somebody looks at it
    shown = command("jobs", "show", id, "--database-url", database_url).out
    found = command("jobs", "show", id, "--json", "--database-url", database_url).json()

    # Then its attempts are told in their order, with worker and error
    whats = [event["what"] for event in found["timeline"]]
    expected = [
        "Sent",
        "Attempt 1 started on worker 01234567 (host.example, process 4711)",
        "Attempt 1 failed, and is tried",
    ]
    expected += [
        "Handed to the broker, for the 2nd time",
        "Attempt 2 started",
        "Attempt 2 failed: ConnectionError",
        "Finished",
    ]
    assert [what for what in expected if any(each.startswith(what) for each in whats)] == expected
    assert [event["at"] for event in found["timeline"]] == sorted(event["at"] for event in found["timeline"])
    assert found["job"]["state"] == "failed" and found["why"].startswith("It will not be tried again by itself")

    # And its input is shown as it was given, but for what is secret
    assert found["input"]["message"]["kwargs"] == {"topic": "tea", "api_key": "***"}
    assert 'research(1, topic="tea", api_key="***")' in shown
    assert "hunter2" not in shown + json.dumps(found)

    # And nothing in it moves the terminal, or is taken for markup
    assert "\x1b" not in shown and "\\x1b[31mbob [bold]" in shown
    # And times are local, with their offset
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+05:30", shown)


def test_why_a_job_waits_is_said(command: Command, db: Database, database_url: str) -> None:
    def why(id: str) -> str:
        return str(command("jobs", "show", id, "--json", "--database-url", database_url).json()["why"])

    # Given a job for each reason to wait
    due, ready, unpublished, fetched = (
        send(db, 1, delay=3_600_000),
        send(db, 2, broker_ref="2.1"),
        send(db, 3),
        send(db, 4),
    )
    jobs.claim(db, OWNER, [fetched], 60_000)
    parked = send(db, 5, parked="no_row")

    # Then each says its own
    assert why(due) == "It is due in 59 min."
    assert "no worker of queue 'default' was seen lately" in why(ready)
    assert "about to be handed to the broker" in why(unpublished)
    assert why(fetched).startswith("Worker 01234567 has fetched it and not started it yet; its lease runs for another")
    assert "never run by itself" in why(parked)
    recovery.enlist(db, WorkerInfo(OWNER, "host.example", 4711, 8, "mails,default"))
    assert "waits its turn; 1 worker process is there" in why(ready)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickled_input_is_never_unpickled(command: Command, db: Database, database_url: str, tmp_path: Path) -> None:
    for number, payload in enumerate((pickle.dumps(Bomb(tmp_path / "boom")), b"[" * 100_000, b'"\xff', b"17")):
        id = send(db, number, payload=payload)

        answer = command("jobs", "show", id, "--database-url", database_url)

        assert answer.code == 0
        assert "no JSON message, not shown" in answer.out
    assert not (tmp_path / "boom").exists()
