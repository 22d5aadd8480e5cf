"""A run that lost its job while its process was frozen: whatever it does afterwards changes nothing."""

from __future__ import annotations

import re
import signal

import pytest

from dramatiq_durable.store import reading, recovery
from tests.acceptance.conftest import World, only_sqlite
from tests.harness.workers import WorkerProcess
from tests.servers import wait_until


def take_over(world: World, id: str) -> tuple[WorkerProcess, WorkerProcess]:
    """Let a worker begin *id* and freeze, and another one begin it too; return both."""
    first = world.fleet.start()
    world.wait_begun(id)
    wait_until(lambda: world.job(id).started_at, what="its start is in the record")
    world.freeze(first)
    second = world.fleet.start()
    world.wait_begun(id, 2)
    return first, second


def wait_told(worker: WorkerProcess) -> None:
    wait_until(lambda: re.search("taken over|refused|was skipped", worker.text()), 40, "the stale run is told")


def settle(world: World) -> None:
    """Wait until a job that was sent just now is done and nothing is left in the broker."""
    marker = world.app.quick.send("marker")
    world.wait_state(marker.message_id, "completed")
    world.wait_idle()


def test_the_result_is_that_of_the_run_that_counts(world: World) -> None:
    """P3, B26: the stale run returns something else, and later; nobody ever sees it."""
    message = world.app.held_pid.send("go")
    first, second = take_over(world, message.message_id)
    world.fleet.touch("go")
    world.wait_state(message.message_id, "completed")
    result = message.get_result(backend=world.app.results, block=True, timeout=30_000)
    assert result in second.children()
    first.thaw()
    wait_told(first)
    settle(world)
    assert message.get_result(backend=world.app.results) == result


def test_a_stale_run_that_fails_is_neither_retried_nor_called_back(world: World) -> None:
    """H12: no retry, no ``on_failure``, no evidence of a run that does not count."""
    # The run of the first worker fails when it wakes; the one of the second succeeds.
    message = world.app.held_flaky.send_with_options(args=("go",), on_failure=world.app.note_failure)
    first, _ = take_over(world, message.message_id)
    world.fleet.touch("go")
    before = world.wait_state(message.message_id, "completed")
    first.thaw()
    wait_told(first)
    settle(world)
    assert world.job(message.message_id) == before
    assert world.journal.count("on_failure") == 0
    assert [a.ended for a in reading.attempts(world.db, message.message_id)] == ["lost"]
    assert world.journal.count("begin", message.message_id) == 2
    assert world.counts() == {"completed": 2}


def test_a_stale_run_that_shuts_its_eyes_sends_nothing(world: World) -> None:
    """P3, DESIGN 6: sends are written under the fence; an actor that swallows the interrupt gets an error for each."""
    message = world.app.stubborn.send("go", 3)
    first, second = take_over(world, message.message_id)
    first.thaw()
    wait_until(lambda: world.journal.count("swallowed", message.message_id) == 1, 40, "it has been interrupted")
    world.fleet.touch("go")
    world.wait_state(message.message_id, "completed")
    wait_until(lambda: world.journal.count("end", message.message_id) == 2, 40, "both have ended")
    refusals = [event for event in world.journal.events("raised", message.message_id)]
    assert {event.pid for event in refusals} <= set(first.children())
    assert [event.detail for event in refusals] == ["StaleRun"] * 3
    settle(world)
    # Only the children of the run that counts are there, each once.
    assert world.counts() == {"completed": 1 + 3 + 1}
    assert second.dead() is False


def test_a_worker_that_was_frozen_before_it_began_does_not_begin(world: World) -> None:
    """Crash matrix: frozen between fetch and start, past its lease: its start is refused."""
    world.fleet.touch("gate")
    first = world.fleet.start()
    message = world.app.quick.send("once")
    wait_until(lambda: world.journal.count("gated", message.message_id), what="the job is fetched")
    world.freeze(first)
    world.fleet.remove("gate")
    world.fleet.start()
    row = world.wait_state(message.message_id, "completed")
    assert (row.attempt, row.lost, row.lost_claims) == (1, 0, 1)
    first.thaw()
    wait_told(first)
    settle(world)
    assert world.journal.count("begin", message.message_id) == 1
    assert world.journal.concurrent(world.fleet.deaths) == []


def test_a_worker_that_nobody_took_over_from_goes_on(world: World) -> None:
    """P3: an expired lease that nobody has taken can be renewed by its owner."""
    worker = world.fleet.start()
    message = world.app.held.send("go")
    world.wait_begun(message.message_id)
    world.freeze(worker)
    lease = world.job(message.message_id).lease_until or 0
    wait_until(lambda: world.database_time() > lease + 500, what="the lease has run out")
    worker.thaw()
    wait_until(lambda: (world.job(message.message_id).lease_until or 0) > lease, what="it is renewed")
    world.fleet.touch("go")
    row = world.wait_state(message.message_id, "completed")
    assert (row.attempt, row.lost) == (1, 0)
    assert world.journal.count("begin", message.message_id) == 1


@only_sqlite
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_worker_process_that_ends_takes_no_job_of_its_sibling_with_it(world: World, number: int) -> None:
    """B7, H43: the master stops the other processes when one dies; their jobs finish or are queued again."""
    worker = world.fleet.start(processes=2, threads=4)
    messages = [world.app.held.send("go") for _ in range(4)]
    for message in messages:
        world.wait_begun(message.message_id)
    pids = {event.pid for event in world.journal.events("begin")}
    victim = min(pids)
    world.fleet.signal_process(victim, number)
    world.fleet.touch("go")
    worker.wait(60)
    world.fleet.start()
    for message in messages:
        world.wait_state(message.message_id, "completed")
    world.assert_kept()


def test_a_job_past_its_max_runtime_is_taken_over_though_its_worker_lives(world: World) -> None:
    """B30, DESIGN 6: renewal stops at ``max_runtime``; a hung thread does not hold its job for ever."""
    first = world.fleet.start()
    message = world.app.hangs_once.send()
    world.wait_begun(message.message_id)
    row = world.wait_state(message.message_id, "completed", timeout=60)
    assert row.lost == 1
    assert world.journal.count("begin", message.message_id) == 2
    assert not first.dead()


@pytest.mark.settings(RECONCILE_INTERVAL="60000", PUBLISH_GRACE="60000")
def test_a_worker_that_wakes_may_take_its_own_job_anew(world: World) -> None:
    """P2: the message of a taken-over job is no duplicate, not even in the process that lost it and does not know."""
    worker = world.fleet.start()
    message = world.app.held.send("go")
    world.wait_begun(message.message_id)
    world.freeze(worker)
    # Given a job that somebody else's reconciler takes away and publishes again
    row = world.job(message.message_id)
    wait_until(lambda: world.database_time() > (row.lease_until or 0), what="the lease has run out")
    assert recovery.reap(world.db, [(row.id, row.claim, row.beat)], 3).requeued == 1
    [due] = recovery.take_due(world.db, 10)
    world.deliver(message.copy(options={"redis_message_id": due.broker_ref}).encode(), ref=due.broker_ref)
    # When its worker wakes, the only one there is
    worker.thaw()
    # Then it gives the old run up and runs the job again
    world.wait_begun(message.message_id, 2)
    world.fleet.touch("go")
    world.wait_state(message.message_id, "completed")
    world.wait_idle()
    assert not worker.dead()
