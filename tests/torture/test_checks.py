"""The checks of the torture find what they are there to find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.journal import Event
from tests.torture import checks, plan

ROW = {
    "id": "a",
    "state": "completed",
    "actor": "quick",
    "reason": None,
    "owner": "me",
    "origin": "sent",
    "parent_id": None,
    "finished_at": 2_000,
    "lost": 0,
    "retries": 0,
}


def run(name: str, pid: int, began: float, ended: float | None, how: str = "ok", job: str = "a") -> list[Event]:
    events = [Event("begin", job, pid, began, {"run": name, "wall": int(began * 1000), "actor": "quick"})]
    if ended is not None:
        events.append(Event("end", job, pid, ended, {"run": name, "wall": int(ended * 1000), "how": how}))
    return events


def judge(events: list[Event], row: dict[str, Any] | None = None, **facts: Any) -> set[str]:
    """Return the names of the checks that object."""
    given: dict[str, Any] = {
        "deaths": {},
        "frozen": [],
        "cut_off": [],
        "leftovers": [],
        "stored": {"k": True},
        "loss": 0,
        "owners": {"me": 10, "you": 11},
        "threads": {},
        "log": [],
        **facts,
    }
    asked = Event("sending", "a", 1, 0.0, {"kind": "quick", "wall": 0, "delay": None, **facts.pop("asked", {})})
    given.pop("asked", None)
    given.setdefault("results", [{"job_id": "a", "key": "k", "created_at": 1, "stored_at": 1}])
    jobs = {} if row == {} else {"a": {**ROW, **(row or {})}}
    events = [asked, Event("sent", "a", 1, 0.0), *events]
    evidence = checks.Evidence(events=events, jobs=jobs, attempts=[], **given)
    return {name for name, found in checks.violations(evidence).items() if found}


GOOD = run("1", 10, 1.0, 1.5)


def test_a_job_that_ran_once_is_well() -> None:
    assert judge(GOOD) == set()


@pytest.mark.parametrize(
    "objection, events, row, facts",
    [
        ("jobs lost", [], {}, {}),
        ("stuck at the end", GOOD, {"state": "active", "finished_at": None}, {}),
        ("two runs at once", run("1", 10, 1.0, 1.9) + run("2", 11, 1.5, 1.8), None, {}),
        ("two runs at once", run("1", 10, 1.0, None) + run("2", 11, 1.5, 1.8), None, {"deaths": {10: 1.6}}),
        ("finished, then run again", GOOD + run("2", 11, 2.5, 2.6), None, {"deaths": {10: 2.0}}),
        ("ended well, repeated without cause", GOOD + run("2", 11, 1.6, 1.7), None, {}),
        ("illegal ends", run("1", 10, 1.0, 1.5, "KeyError"), None, {}),
        ("illegal ends", GOOD, {"state": "cancelled", "reason": "skipped"}, {}),
        ("completed by a run that had lost it", GOOD, {"owner": "you"}, {}),
        ("callbacks missing or too many", GOOD, None, {"asked": {"callback": True}}),
        ("begun before they were due", GOOD, None, {"asked": {"delay": 1_500}}),
        ("results missing", GOOD, None, {"results": []}),
        ("results missing", GOOD, None, {"stored": {}}),
        ("left in the broker", GOOD, None, {"leftovers": ["a payload"]}),
        ("threads that no longer work", GOOD, None, {"asked": {"kind": "probe"}, "threads": {10: 2}}),
        ("surprises in the logs", GOOD, None, {"log": ["Unexpected failure while reconciling."]}),
    ],
)
def test_a_check_objects(
    objection: str, events: list[Event], row: dict[str, Any] | None, facts: dict[str, Any]
) -> None:
    assert objection in judge(events, row, **facts)


def test_a_process_that_was_frozen_past_its_lease_is_excused_for_a_moment() -> None:
    # Given a run that was frozen past its lease, and another that took over
    frozen = [(10, 1.1, 1.1 + plan.LEASE + 1)]
    woke = frozen[0][2]
    # Then it may go on for a moment after it woke up, and not for long
    taken_over = run("2", 11, 4.5, 4.6)
    row = {"finished_at": 4_600, "owner": "you"}
    soon = run("1", 10, 1.0, woke + 0.5, "LeaseLost") + taken_over
    assert judge(soon, row, frozen=frozen) == set()
    late = run("1", 10, 1.0, woke + 10) + taken_over
    assert judge(late, row, frozen=frozen) == {"two runs at once"}


def test_a_seed_means_the_same_jobs_and_faults_every_time() -> None:
    for database in ("sqlite", "postgresql"):
        assert plan.faults(7, 60, database) == plan.faults(7, 60, database) != plan.faults(8, 60, database)
    assert plan.jobs(7, 60) == plan.jobs(7, 60) != plan.jobs(8, 60)
