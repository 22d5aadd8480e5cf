"""Coroutines: they run on another thread than their job, and may outlive it (H54, H55)."""

from __future__ import annotations

import pytest

from dramatiq_durable.store import reading
from tests.acceptance.conftest import World, only_sqlite
from tests.servers import wait_until


def test_what_a_coroutine_sends_is_sent_once_however_often_it_runs(world: World) -> None:
    """H55: the current run is seen on the loop's thread; sends are fenced, and their ids derived."""
    # Given a coroutine whose worker is killed after it has sent
    first = world.fleet.start()
    job = world.app.async_parent.send(3, "go")
    wait_until(lambda: world.journal.count("sent", job.message_id) == 1, what="it has sent")
    world.fleet.kill(first)
    # When it runs again, and sends again
    world.fleet.start()
    wait_until(lambda: world.journal.count("sent", job.message_id) == 2, 40, "the rerun has sent")
    world.fleet.touch("go")
    world.wait_state(job.message_id, "completed")
    # Then there are three children of it, and no more
    wait_until(lambda: world.counts() == {"completed": 4}, 40, "three children, and no more")
    children = [row for row in reading.list_jobs(world.db) if row.id != job.message_id]
    assert {row.parent_id for row in children} == {job.message_id}


@only_sqlite
def test_threads_of_one_actor_that_send_at_the_same_time_lose_nothing(world: World) -> None:
    """Two jobs with one derived id would be one job."""
    world.fleet.start()
    job = world.app.async_threads.send(60)
    world.wait_state(job.message_id, "completed")
    wait_until(lambda: world.counts() == {"completed": 61}, 40, f"60 children: {world.counts()}")


def test_a_coroutine_that_lost_its_job_is_cancelled_and_sends_nothing(world: World) -> None:
    """P3: the interrupt reaches coroutines; the stale run's send is refused."""
    # Given a coroutine in a worker that freezes until another one has the job
    first = world.fleet.start()
    job = world.app.async_waits.send("go")
    world.wait_begun(job.message_id)
    first.freeze()
    world.fleet.start()
    world.wait_begun(job.message_id, 2)
    # When the first wakes
    first.thaw()
    # Then its coroutine is cancelled, and what it sends on its way out is refused
    (cancelled,) = wait_until(lambda: world.journal.events("cancelled", job.message_id), 40, "it is cancelled")
    (raised,) = wait_until(lambda: world.journal.events("raised", job.message_id), 10, "its send is refused")
    assert raised.detail == "StaleRun" and raised.pid == cancelled.pid
    world.fleet.touch("go")
    row = world.wait_state(job.message_id, "completed")
    assert row.lost + row.lost_claims == 1
    assert len(reading.list_jobs(world.db)) == 2, "only the second run has sent"


def test_a_coroutine_that_outlives_its_job_can_neither_send_nor_write(world: World) -> None:
    """H54: it resists the cancellation of its time limit, and goes on beside whatever comes next."""
    # Given a coroutine that ignores its cancellation
    worker = world.fleet.start()
    job = world.app.async_stubborn.send("let it end")
    world.wait_begun(job.message_id)
    world.wait_said(worker, "Timed out while waiting for coroutine")
    row = world.wait_state(job.message_id, "failed")
    # When it goes on, and sends and returns a result
    world.fleet.touch("let it end")
    (raised,) = wait_until(lambda: world.journal.events("raised", job.message_id), 20, "its send is refused")
    assert raised.detail == "StaleRun"
    wait_until(lambda: world.journal.count("end", job.message_id) == 1, 20, "it has ended")
    # Then nothing has changed, and the next job on that loop is its own run
    marker = world.app.coroutine.send("after")
    world.wait_state(marker.message_id, "completed")
    assert world.job(job.message_id) == row
    assert row.attempt == 1
    wait_until(lambda: len(reading.list_jobs(world.db)) == 3, what="the marker and its child")


@only_sqlite
def test_a_job_whose_coroutine_resists_is_not_retried_before_its_lease_is_over(world: World) -> None:
    """H54, P3: its retry waits as if its worker had died."""
    worker = world.fleet.start()
    job = world.app.async_stubborn.send_with_options(args=("never",), max_retries=1)
    world.wait_said(worker, "Timed out while waiting for coroutine")
    row = world.wait_state(job.message_id, "scheduled")
    world.wait_begun(job.message_id, 2)
    began, again = (event.at for event in world.journal.events("begin", job.message_id))
    assert row.retries == 1
    # The time limit, a second of waiting, and most of a lease that was renewed a heartbeat ago.
    assert again - began > 1.0 + 1.0 + 1.2


@pytest.mark.parametrize("stubborn", [False, True], ids=["obedient", "stubborn"])
def test_a_deployment_does_not_charge_a_coroutine(world: World, stubborn: bool) -> None:
    """H49 and H54: an interruption by a shutdown is nobody's failure, also when the coroutine resists it."""
    worker = world.fleet.start()
    actor = world.app.async_stubborn if stubborn else world.app.async_waits
    job = actor.send_with_options(args=("go",), time_limit=60_000)
    world.wait_begun(job.message_id)
    worker.terminate()
    assert worker.wait(30) == 0
    row = world.job(job.message_id)
    assert (row.state, row.attempt, row.retries, row.interruptions, row.lost) == ("queued", 0, 0, 1, 0)
    world.fleet.touch("go")
    world.fleet.start()
    assert world.wait_state(job.message_id, "completed").attempt == 1
