"""A process that is frozen inside a transaction holds its rows, and nothing else."""

from __future__ import annotations

import pytest

from dramatiq_durable.store import recovery
from dramatiq_durable.store.database import Database
from dramatiq_durable.store.dialects import Statement
from tests.store.rows import change, expire, row, started


@pytest.mark.parametrize("record_url", ["postgresql"], indirect=True)
def test_a_row_that_a_frozen_process_has_locked_does_not_keep_others_from_being_taken_over(
    db: Database, other: Database
) -> None:
    """P2: one process that is frozen while it commits does not stop reconciliation for everybody."""
    # Given two jobs whose leases ran out, one of them locked by a transaction that does not go on
    for id in ("a", "b"):
        started(db, id)
    expire(db, "a", "b")
    overdue = [active[:3] for active in recovery.watch(db)]
    with other.transaction():
        change(other, "UPDATE {jobs} SET reason = reason WHERE id = ?", "a")
        # When both are to be taken over
        reaped = recovery.reap(db, overdue, 3)
        # Then the free one is, and the other one later
        assert reaped.requeued == 1
        assert (row(db, "a").state, row(db, "b").state) == ("active", "queued")
    assert recovery.reap(db, overdue, 3).requeued == 1
    assert row(db, "a").lost == 1


@pytest.mark.parametrize("record_url", ["postgresql"], indirect=True)
def test_the_server_ends_a_transaction_that_does_not_go_on(db: Database) -> None:
    """A frozen process does not hold its rows for ever, and its session settings stay its own."""
    setting = Statement("look at a setting", "SELECT current_setting('idle_in_transaction_session_timeout')")
    with db.transaction():
        assert db.fetch(setting) == [("15s",)]
    assert db.fetch(setting) == [("0",)]
