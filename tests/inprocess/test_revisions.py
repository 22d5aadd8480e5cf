"""What runs is the row's input, whatever the copy in the broker says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dramatiq

from dramatiq_durable.store.dialects import Statement
from tests.inprocess.conftest import Bench
from tests.servers import wait_until

_SPOIL = Statement("spoil a payload", "UPDATE {jobs} SET payload = ?, revision = revision + 1 WHERE id = ?")


def _pair(b: Bench) -> tuple[Any, list[Any]]:
    runs: list[Any] = []

    @dramatiq.actor(broker=b.broker)
    def run(value: Any) -> None:
        runs.append(value)

    return run, runs


def test_a_payload_that_cannot_be_read_parks_its_job_and_leaves_its_neighbours_alone(
    bench: Callable[..., Bench],
) -> None:
    """DESIGN 6 and 8: the row is reloaded when its message is of another revision; P2 when that fails."""
    # Given a job whose row this process cannot decode, among others
    b = bench()
    run, runs = _pair(b)
    first, spoilt, last = run.send(1), run.send(2), run.send(3)
    b.db.execute(_SPOIL, (b"\x00 no message", spoilt.message_id))
    # When a worker takes all of them
    b.work()
    wait_until(lambda: b.job(spoilt).state == "parked", what="the job is parked")
    b.join()
    # Then it is parked with the reason, and the others have run
    assert (b.job(spoilt).reason, b.job(spoilt).attempt) == ("undecodable", 0)
    assert [b.job(m).state for m in (first, last)] == ["completed", "completed"]
    assert sorted(runs) == [1, 3]


def test_an_old_copy_without_our_mark_runs_what_the_row_says(bench: Callable[..., Bench]) -> None:
    """A copy of an unequipped process carries no revision: it counts as the first."""
    b = bench()
    run, runs = _pair(b)
    sent = run.send("old")
    newer = run.message("new")
    b.db.execute(_SPOIL, (sent.copy(args=newer.args).encode(), sent.message_id))
    b.broker.flush("default")
    unmarked = sent.copy()
    unmarked.options.clear()
    b.broker.queues["default"].put(unmarked.encode())
    b.work()
    b.join()
    assert runs == ["new"]
