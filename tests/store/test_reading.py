"""What people ask."""

from __future__ import annotations

from dramatiq_durable.store import outcomes, reading
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.jobs import record, record_many
from dramatiq_durable.store.types import Outcome
from tests.store.rows import change, claimed, new, row


def test_jobs_are_counted_by_state(db: Database) -> None:
    assert reading.counts(db) == {}
    record_many(db, [new("a"), new("b"), new("c", delay=60_000), new("d", parked="x")])
    outcomes.settle(db, "w1", [Outcome("e", claimed(db, "e").claim, "completed")])

    assert reading.counts(db) == {"queued": 2, "scheduled": 1, "parked": 1, "completed": 1}


def test_the_oldest_of_each_queue_is_known(db: Database) -> None:
    record_many(db, [new("a"), new("b"), new("c", queue="slow"), new("d", queue="later", delay=60_000)])
    change(db, "UPDATE {jobs} SET created_at = created_at - 5000 WHERE id = 'b'")

    (default, slow) = reading.oldest_waiting(db)

    assert (default[:2], slow[:2]) == (("default", 2), ("slow", 1))
    assert 5_000 <= default[2] < 65_000


def test_the_unfinished_of_a_queue_are_neither_held_nor_final(db: Database) -> None:
    record_many(db, [new("a"), new("b", delay=60_000), new("c", parked="x"), new("d", queue="other")])
    claimed(db, "e")
    outcomes.settle(db, "w1", [Outcome("f", claimed(db, "f").claim, "failed")])

    assert reading.unfinished(db, "default") == 3


def test_jobs_are_listed_newest_first_page_by_page(db: Database) -> None:
    # Given 25 jobs, some of the same millisecond, whose ids say nothing about their age
    ids = [f"{(i * 7) % 25:02}" for i in range(25)]
    for i, id in enumerate(ids):
        record(db, new(id, queue="q" if i % 2 else "r", actor="x" if i % 3 else "y"))
        change(db, "UPDATE {jobs} SET created_at = ? WHERE id = ?", 1_000 + i // 3, id)
    expected = [id for _, id in sorted(((1_000 + i // 3, id) for i, id in enumerate(ids)), reverse=True)]

    pages, after = [], None
    while page := reading.list_jobs(db, limit=10, after=after):
        pages.append([job.id for job in page])
        after = page[-1].id

    assert [len(page) for page in pages] == [10, 10, 5]
    assert [id for page in pages for id in page] == expected


def test_lists_are_narrowed_by_state_queue_and_actor(db: Database) -> None:
    record_many(db, [new("a"), new("b", queue="slow"), new("c", actor="mail"), new("d", delay=60_000)])
    outcomes.settle(db, "w1", [Outcome("e", claimed(db, "e").claim, "completed")])

    def listed(**fields: str) -> list[str]:
        return sorted(job.id for job in reading.list_jobs(db, **fields))  # type: ignore[arg-type]

    assert listed() == ["a", "b", "c", "d", "e"]
    assert listed(state="queued") == ["a", "b", "c"]
    assert listed(state="completed") == ["e"]
    assert listed(queue="slow") == ["b"]
    assert listed(actor="mail") == ["c"]
    assert listed(state="queued", queue="default", actor="work") == ["a"]
    assert listed(state="nonsense") == []


def test_a_job_that_does_not_exist_is_none(db: Database) -> None:
    record(db, new("a"))

    assert reading.get_job(db, "b") is None
    assert reading.get_job(db, "a") == row(db, "a")
    assert reading.attempts(db, "b") == []


def test_the_clock_is_the_databases(db: Database) -> None:
    first, second = reading.now(db), reading.now(db)

    # The 2020s to 2060s, in milliseconds
    assert 1_577_836_800_000 < first <= second < 2_840_140_800_000
