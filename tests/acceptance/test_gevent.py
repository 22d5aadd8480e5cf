"""``dramatiq-gevent``: jobs are greenlets, and so are our threads; all but the heartbeat."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.acceptance.conftest import World
from tests.harness.outage import DatabaseLink
from tests.servers import wait_until

pytest.importorskip("gevent")

GEVENT = {"gevent": True}


def test_jobs_of_all_kinds_complete_under_gevent(world: World) -> None:
    """Results, retries, delays, failures, sends of running jobs and coroutines."""
    worker = world.fleet.start(threads=20, how=GEVENT)
    jobs = [world.app.quick.send(i) for i in range(50)]
    delayed = world.app.quick.send_with_options(args=(1,), delay=300)
    flaky = world.app.flaky.send(1)
    broken = world.app.breaks.send()
    coroutine = world.app.coroutine.send("value")
    sum_ = world.app.add.send(1, 2)
    assert sum_.get_result(backend=world.app.results, block=True, timeout=30_000) == 3
    for job in [*jobs, delayed, flaky, coroutine]:
        world.wait_state(job.message_id, "completed")
    world.wait_state(broken.message_id, "failed")
    worker.terminate()
    assert worker.wait(30) == 0, worker.text()
    assert worker.text().count("CRITICAL") == 0
    world.assert_kept()


def test_many_greenlets_wait_at_the_same_time(world: World) -> None:
    """Nothing of ours holds up the hub: sleeping jobs overlap."""
    world.fleet.start(threads=20, how=GEVENT)
    jobs = [world.app.slow.send(2) for _ in range(20)]
    wait_until(lambda: world.counts() == {"completed": len(jobs)}, 30, "all are completed")
    began = [event.at for event in world.journal.events("begin")]
    ended = [event.at for event in world.journal.events("end")]
    assert max(began) < min(ended), "they did not run side by side"


def test_a_job_that_computes_for_longer_than_its_lease_runs_once(world: World) -> None:
    """B17 under gevent: it lets no greenlet run, and its lease is renewed all the same."""
    # Given a job that computes for three leases under gevent
    world.fleet.start(how=GEVENT)
    job = world.app.computes.send(7)
    world.wait_begun(job.message_id)
    # When another worker is there to take it over
    world.fleet.start()
    row = world.wait_state(job.message_id, "completed")
    # Then it has run once
    assert world.journal.count("begin", job.message_id) == 1
    assert (row.attempt, row.lost, row.lost_claims) == (1, 0, 0)


def test_a_greenlet_that_lost_its_job_is_interrupted_and_writes_nothing(world: World) -> None:
    """P3 under gevent: a frozen process wakes after its lease."""
    first = world.fleet.start(how=GEVENT)
    job = world.app.held.send("go")
    world.wait_begun(job.message_id)
    first.freeze()
    world.fleet.start()
    world.wait_begun(job.message_id, 2)
    first.thaw()
    world.wait_said(first, "LeaseLost")
    world.fleet.touch("go")
    world.wait_state(job.message_id, "completed")
    # And the greenlet goes on with the next job
    marker = [world.app.quick.send(i) for i in range(10)]
    for each in marker:
        world.wait_state(each.message_id, "completed")
    assert world.journal.count("end", job.message_id) == 1


def test_a_killed_gevent_worker_loses_nothing(world: World) -> None:
    """P2 under gevent."""
    first = world.fleet.start(how=GEVENT)
    job = world.app.held.send("go")
    world.wait_begun(job.message_id)
    world.fleet.kill(first)
    world.fleet.start(how=GEVENT)
    world.wait_begun(job.message_id, 2)
    world.fleet.touch("go")
    world.wait_state(job.message_id, "completed")
    world.assert_kept()


def test_a_database_that_is_silent_does_not_hold_up_the_greenlets(world: World, database_link: DatabaseLink) -> None:
    """Writer, courier, scheduler and consumers wait for the database as greenlets do: the jobs go on."""
    # Given a job that ticks, under gevent
    world.fleet.start(how=GEVENT)
    ticking = world.app.ticks.send("go")
    world.wait_begun(ticking.message_id)
    # When the database answers nothing, while outcomes and due jobs wait for it
    jobs = [world.app.quick.send(i) for i in range(5)]
    database_link.silence()
    silent_since = time.monotonic()
    wait_until(lambda: time.monotonic() - silent_since > 2, what="it has been silent for 2 seconds")
    silent_until = time.monotonic()
    database_link.restore()
    # Then the job went on ticking
    ticks = [event.at for event in world.journal.events("tick") if silent_since < event.at < silent_until]
    gaps = [after - before for before, after in itertools.pairwise([silent_since, *ticks, silent_until])]
    assert max(gaps) < 1, f"the greenlets stood still for {max(gaps):.1f} s"
    # And nothing is lost
    world.fleet.touch("go")
    for job in [ticking, *jobs]:
        world.wait_state(job.message_id, "completed")
    world.assert_kept()
