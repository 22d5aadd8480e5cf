"""The store against a small model: any sequence of calls, by any owner, with any token, new or old.

After every call each row must be what the model says, and every change of a row must be one that ``states.LEGAL``
allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from dramatiq_durable.states import LEGAL
from dramatiq_durable.store import jobs, migrate, outcomes, reading, recovery
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.types import Outcome, Token
from tests.stateful.model import Model
from tests.store.rows import LEASE, change, new

LATER = 3_600_000
MAX_LOST, MAX_INTERRUPTIONS = 2, 2
IDS = [f"job-{i}" for i in range(5)]

ids = st.sampled_from(IDS)
some_ids = st.lists(ids, min_size=1, max_size=4)
owners = st.sampled_from(["w1", "w2", "w3"])
kinds = st.sampled_from(["completed", "failed", "retry", "interrupted", "released", "parked", "skipped"])
policies = st.sampled_from(["rerun", "hold", "fail"])
# Which of the tokens that were ever granted: most often one of the last
tokens = st.one_of(st.integers(0, 3), st.integers(0, 30))


class StoreMachine(RuleBasedStateMachine):
    """Any number of owners over one record."""

    def __init__(self, db: Database) -> None:
        super().__init__()
        self.db = db
        for table in ("jobs", "attempts", "results"):
            change(db, f"DELETE FROM {{{table}}}")
        self.model = Model(MAX_LOST, MAX_INTERRUPTIONS, has_clock=db.dialect.name == "postgresql")
        self.granted: list[Token] = []
        self.settled: list[tuple[str, Outcome]] = []
        self.watched: list[tuple[str, int, int]] = []
        self.refs: list[tuple[str, str | None]] = []
        self.before: dict[str, reading.JobRow] = {}
        self.children = 0

    def token(self, place: int, id: str, owner: str) -> Token:
        """A token that was granted once, or one that never was."""
        return self.granted[-1 - place] if place < len(self.granted) else Token(id, owner, 1)

    # Producers

    @rule(id=ids, delayed=st.booleans(), published=st.booleans())
    def record(self, id: str, delayed: bool, published: bool) -> None:
        ref = f"{id}-ref" if published else None
        answer = jobs.record(self.db, new(id, delay=LATER if delayed else None, broker_ref=ref))
        assert (answer == "recorded") == self.model.record(id, delayed=delayed, ref=ref)

    @rule(id=ids, reason=st.sampled_from(["no_row", "unknown_actor"]))
    def record_parked(self, id: str, reason: str) -> None:
        answer = jobs.record_many(self.db, [new(id, parked=reason)])
        assert bool(answer) == self.model.record(id, parked=reason)

    @rule(id=ids, place=tokens, owner=owners, parent=ids)
    def record_under(self, id: str, place: int, owner: str, parent: str) -> None:
        token = self.token(place, parent, owner)
        answer = jobs.record(self.db, new(id, broker_ref=None), under=token)
        if not self.model.runs(*token):
            assert answer == "stale"
        else:
            assert (answer == "recorded") == self.model.record(id)

    # Owners

    @rule(owner=owners, wanted=some_ids, again=st.booleans())
    def claim(self, owner: str, wanted: list[str], again: bool) -> None:
        found = jobs.claim(self.db, owner, wanted, LEASE, again=again)
        granted = {claim.id: claim.claim for claim in found}
        assert granted == self.model.claim(owner, wanted, again) and len(found) == len(granted)
        for claim in found:
            job = self.model.jobs[claim.id]
            assert claim[2:] == (job.revision, job.attempt, job.retries, job.lost_claims, job.lost)
            self.granted.append(Token(claim.id, owner, claim.claim))

    @rule(place=tokens, id=ids, owner=owners, policy=policies, alone=st.integers(0, 1))
    def start(self, place: int, id: str, owner: str, policy: str, alone: int) -> None:
        token = self.token(place, id, owner)
        answer = jobs.start(self.db, token.owner, [(token.id, token.claim, policy, alone)], LEASE)
        assert answer.get(token.id) == self.model.start(token.owner, token.id, token.claim, policy, alone)

    @rule(owner=owners, places=st.lists(tokens, max_size=4), began=st.booleans())
    def renew(self, owner: str, places: list[int], began: bool) -> None:
        held = {t.id: (t.claim, began) for t in (self.token(place, "job-0", owner) for place in places)}
        beat = jobs.renew(self.db, owner, [(id, claim, began) for id, (claim, _) in held.items()], LEASE)
        renewed, strays = self.model.renew(owner, held)
        assert {id for id, _ in beat.renewed} == renewed
        assert {id for id, _, _ in beat.strays} == strays
        assert all(started == self.model.jobs[id].started for id, _, started in beat.strays)

    @rule(place=tokens, id=ids, owner=owners)
    def release(self, place: int, id: str, owner: str) -> None:
        token = self.token(place, id, owner)
        answer = jobs.release(self.db, token.owner, [(token.id, token.claim)], "stopped")
        assert bool(answer) == self.model.release(token.owner, token.id, token.claim, "stopped")

    @rule(places=st.lists(st.tuples(tokens, kinds, st.booleans()), min_size=1, max_size=3), owner=owners, id=ids)
    def settle(self, places: list[tuple[int, str, bool]], owner: str, id: str) -> None:
        batch: dict[str, Outcome] = {}
        for place, kind, flag in places:
            token = self.token(place, id, owner)
            self.children += 1
            outcome = Outcome(
                token.id,
                token.claim,
                kind,
                started=kind in ("completed", "interrupted") or kind in ("retry", "failed") and flag,
                delay=LATER if flag else 0,
                options=b"{}" if kind == "retry" and flag else None,
                reason=kind,
                follow_ups=(new(f"child-{self.children}", broker_ref=None),),
            )
            if token.owner == owner:
                batch[token.id] = outcome
        self._settle(owner, list(batch.values()))

    @rule(place=tokens)
    def settle_again(self, place: int) -> None:
        if place < len(self.settled):
            owner, outcome = self.settled[-1 - place]
            self._settle(owner, [outcome])

    def _settle(self, owner: str, batch: list[Outcome]) -> None:
        accepted = outcomes.settle(self.db, owner, batch, max_interruptions=MAX_INTERRUPTIONS)
        expected = set()
        for outcome in batch:
            fresh = self.model.runs(outcome.id, owner, outcome.claim)
            written = self.model.settle(
                owner,
                outcome.id,
                outcome.claim,
                outcome.kind,
                started=outcome.started,
                delay=outcome.delay,
                changed=outcome.options is not None,
            )
            if written:
                expected.add(outcome.id)
                if fresh:
                    self.model.record(outcome.follow_ups[0].id)
                self.settled.append((owner, outcome))
        assert accepted == expected

    # Reconcilers

    @rule(which=some_ids)
    def let_leases_run_out(self, which: list[str]) -> None:
        for id in which:
            change(self.db, "UPDATE {jobs} SET lease_until = 0 WHERE id = ? AND state = 'active'", id)
            if id in self.model.jobs and self.model.jobs[id].state == "active":
                self.model.jobs[id].expired = True

    @rule()
    def watch(self) -> None:
        self.watched = [(row.id, row.claim, row.beat) for row in recovery.watch(self.db)]
        active = {(id, job.claim, job.beat) for id, job in self.model.jobs.items() if job.state == "active"}
        assert set(self.watched) == active

    @rule()
    def reap(self) -> None:
        assert recovery.reap(self.db, self.watched, MAX_LOST) == self.model.reap(self.watched)

    @rule()
    def time_passes(self) -> None:
        change(self.db, "UPDATE {jobs} SET publish_at = {now} - 1 WHERE publish_at IS NOT NULL")
        for job in self.model.jobs.values():
            job.publish = job.publish and "now"

    @rule()
    def take_due(self) -> None:
        taken = recovery.take_due(self.db, 1_000)
        assert {due.id for due in taken} == self.model.take_due()
        assert all(due.broker_ref == self.model.jobs[due.id].ref for due in taken)

    @rule()
    def look_for_waiting(self) -> None:
        page = recovery.waiting_page(self.db, "", 1_000, -1_000)
        self.refs = [(row.id, row.broker_ref) for row in page]
        waiting = {(id, job.ref) for id, job in self.model.jobs.items() if self.model.waits(id, job.ref)}
        assert set(self.refs) == waiting

    @rule(delayed=st.booleans(), back=st.booleans(), most=st.integers(1, 4))
    def publish_again(self, delayed: bool, back: bool, most: int) -> None:
        given = self.refs[:most]
        if back:
            assert recovery.put_back(self.db, given) == {id for id, ref in given if self.model.put_back(id, ref)}
        else:
            refs = [(id, ref or "") for id, ref in given]
            count = recovery.unpublish(self.db, refs, LATER if delayed else 0)
            assert count == sum(self.model.unpublish(id, ref, delayed) for id, ref in given)

    @rule()
    def unpark(self) -> None:
        count = recovery.unpark(self.db, ["work"], 1_000)
        assert count == sum([self.model.unpark(id) for id in self.model.jobs])

    # What must always hold

    @invariant()
    def rows_are_what_the_model_says(self) -> None:
        rows = {row.id: row for row in reading.list_jobs(self.db, limit=10_000)}
        assert rows.keys() == self.model.jobs.keys()
        now = reading.now(self.db)
        for id, row in rows.items():
            job = self.model.jobs[id]
            publish = None if row.publish_at is None else "now" if row.publish_at <= now else "later"
            assert (row.state, publish, row.broker_ref, row.owner) == (job.state, job.publish, job.ref, job.owner), row
            assert (row.started_at is not None) == job.started, row
            for name in _COUNTED:
                assert getattr(row, name) == getattr(job, name), (name, row, job)

    @invariant()
    def changes_are_legal(self) -> None:
        rows = {row.id: row for row in reading.list_jobs(self.db, limit=10_000)}
        for id, row in rows.items():
            before = self.before.get(id)
            source, target = _phase(before), _phase(row)
            if source != target:
                # A run that was not started strictly starts with its outcome
                direct = (source, target) in LEGAL
                assert direct or source == "claimed" and ("started", target) in LEGAL, (source, target)
            if before is not None:
                for name in ("claim", "beat", "publishes", "lost", "lost_claims", "interruptions", "revision"):
                    assert getattr(row, name) >= getattr(before, name), (name, before, row)
                assert before.finished_at in (None, row.finished_at)
        self.before = rows

    @invariant()
    def lost_runs_have_their_evidence(self) -> None:
        for id, job in self.model.jobs.items():
            ended = [attempt.ended for attempt in reading.attempts(self.db, id)] if job.lost else []
            assert ended.count("lost") == job.lost


_COUNTED = (
    "claim",
    "beat",
    "revision",
    "attempt",
    "retries",
    "lost_claims",
    "lost",
    "interruptions",
    "publishes",
    "put_back",
    "on_lost",
    "alone",
    "reason",
)


def _phase(row: reading.JobRow | None) -> str:
    if row is None:
        return "new"
    if row.state == "active":
        return "claimed" if row.started_at is None else "started"
    return row.state


@pytest.fixture
def db(database_url: str, tmp_path: Path) -> Iterator[Database]:
    db = connect(database_url)
    migrate.upgrade(db)
    if db.dialect.name == "sqlite":
        # Thousands of small transactions, none of which has to survive this test
        change(db, "PRAGMA synchronous = OFF")
    yield db
    db.close_all()


def test_the_store_does_what_the_model_says(db: Database) -> None:
    examples: Any = os.environ.get("DURABLE_TEST_EXAMPLES", 60)
    run_state_machine_as_test(
        lambda: StoreMachine(db),
        settings=settings(
            max_examples=int(examples),
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
