"""Rows that somebody outside has locked, as people do who forget to commit."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dramatiq_durable.runtime.sweeper import Sweeper
from dramatiq_durable.store import jobs, reading
from dramatiq_durable.store.database import connect
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import NewJob
from tests.inprocess.conftest import Bench

_LOCK = Statement("lock a row", "UPDATE {jobs} SET reason = reason WHERE id = ?")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_living_worker_comes_before_the_reaper_when_a_lock_on_its_row_is_gone(
    bench: Callable[..., Bench], database_url: str
) -> None:
    """P3: while the row is locked nobody can renew the lease and nobody can take the job; then the owner can."""
    # Given a started job of a worker that lives
    handle = bench(lease=300, heartbeat_interval=100).handle
    db = handle.db
    jobs.record(db, NewJob("a", "default", "work", "work", b"{}", broker_ref="a"))
    (claimed,) = jobs.claim(db, "alive", ["a"], 300)
    jobs.start(db, "alive", [("a", claimed.claim, "rerun", 0)], 300)
    held = [("a", claimed.claim, True)]
    sweeper = Sweeper(handle.engine, interval=60_000)
    outsider = connect(database_url)
    try:
        # When somebody locks its row for longer than its lease, so that it can be neither renewed nor taken over
        with outsider.transaction():
            outsider.execute(_LOCK, ("a",))
            for _ in range(40):
                assert not jobs.renew(db, "alive", held, 300).renewed
                sweeper._turn()
                time.sleep(0.025)
                since = time.monotonic() - min([seen for *_, seen in sweeper._watch._seen.values()], default=0.0)
                if 0.26 <= since < 1:
                    # The worst moment for the lock to go away.
                    break
        # Then the reaper, though it comes first when the lock is gone, leaves it to its owner
        for _ in range(4):
            sweeper._turn()
            time.sleep(0.025)
        row = reading.get_job(db, "a")
        assert row is not None and (row.state, row.owner, row.lost) == ("active", "alive", 0)
        assert jobs.renew(db, "alive", held, 300).renewed
    finally:
        outsider.close_all()
        sweeper.stop()
