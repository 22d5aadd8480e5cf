"""Workers that die, at the worst moments."""

from __future__ import annotations

from dramatiq_durable.store import reading
from tests.acceptance.conftest import World
from tests.servers import wait_until


def test_a_job_whose_worker_is_killed_runs_again_and_never_twice_at_once(world: World) -> None:
    """P2, P3, B15: recovered after the lease without anybody doing anything."""
    # Given a worker that runs a job
    first = world.fleet.start()
    job = world.app.held.send("go")
    world.wait_begun(job.message_id)
    # When it is killed, and another one is there
    world.fleet.kill(first)
    world.fleet.start()
    world.wait_begun(job.message_id, 2)
    world.fleet.touch("go")
    # Then the job completes, and its runs did not overlap
    row = world.wait_state(job.message_id, "completed")
    assert world.journal.count("end", job.message_id) == 1
    assert row.lost + row.lost_claims == 1
    world.assert_kept()


def test_a_kill_between_fetch_and_start_charges_nothing(world: World) -> None:
    """P2, crash matrix "in a dead worker's memory": one claim wins, nothing is charged."""
    # Given a worker that has fetched a job and not begun it
    world.fleet.touch("gate")
    first = world.fleet.start()
    job = world.app.quick.send(7)
    wait_until(lambda: world.journal.count("gated", job.message_id), what="the job is fetched")
    # When it is killed
    world.fleet.kill(first)
    world.fleet.remove("gate")
    world.fleet.start()
    # Then the job runs once, as its first attempt
    row = world.wait_state(job.message_id, "completed")
    assert (row.attempt, row.retries, row.lost) == (1, 0, 0)
    assert world.journal.count("begin", job.message_id) == 1


def test_a_job_that_kills_its_worker_fails_in_the_end_and_its_neighbours_complete(world: World) -> None:
    """P7, B5, H47: worker deaths are counted, and nobody else is failed with the culprit."""
    # Given a job that kills whoever runs it, among innocent ones
    neighbours = [world.app.quick.send(i) for i in range(3)]
    culprit = world.app.poison.send()
    neighbours += [world.app.quick.send(i) for i in range(3, 6)]

    # When workers are started again and again
    def settled() -> bool:
        if not world.fleet.workers or world.fleet.workers[-1].dead():
            world.fleet.start(threads=2, ready=False)
        return world.state(culprit.message_id) == "failed"

    wait_until(settled, 90, "the culprit has failed", interval=0.2)
    # Then it has failed as what it is, after a bounded number of deaths
    row = world.job(culprit.message_id)
    assert row.reason == "worker_lost"
    assert world.journal.count("begin", culprit.message_id) <= 4
    assert {a.ended for a in reading.attempts(world.db, culprit.message_id)} == {"lost"}
    # And the neighbours are completed
    wait_until(
        lambda: settled() and all(world.state(n.message_id) == "completed" for n in neighbours),
        60,
        "neighbours complete",
    )


def test_a_lost_run_of_an_actor_that_says_fail_is_never_started_again(world: World) -> None:
    """B8: ``on_lost="fail"``: a killed job is not started a second time."""
    first = world.fleet.start()
    job = world.app.once.send("go")
    world.wait_begun(job.message_id)
    world.fleet.kill(first)
    world.fleet.start()
    row = world.wait_state(job.message_id, "failed")
    assert row.reason == "worker_lost"
    assert world.journal.count("begin", job.message_id) == 1


def test_a_lost_run_of_an_actor_that_says_hold_waits_for_a_person(world: World) -> None:
    """DESIGN 6: ``on_lost="hold"`` leads to in_doubt."""
    first = world.fleet.start()
    job = world.app.careful.send("go")
    world.wait_begun(job.message_id)
    world.fleet.kill(first)
    world.fleet.start()
    world.wait_state(job.message_id, "in_doubt")
    assert world.journal.count("begin", job.message_id) == 1


def test_a_frozen_worker_that_wakes_after_its_lease_changes_nothing(world: World) -> None:
    """P3, B26, H12: the stale run publishes nothing, stores nothing and writes nothing."""
    # Given a job with a callback, a next stage and a result, in a worker that freezes
    first = world.fleet.start()
    message = world.app.held_result.message_with_options(
        args=("go", "value"), on_success=world.app.note_success.actor_name
    )
    chain = message | world.app.quick.message()
    chain.run()
    id = message.message_id
    world.wait_begun(id)
    world.freeze(first)
    # When another one takes the job over and finishes it
    world.fleet.start()
    world.wait_begun(id, 2)
    world.fleet.touch("go")
    world.wait_state(id, "completed")
    wait_until(lambda: world.journal.count("on_success", id) == 1, what="the callback has run")
    stage = chain.messages[-1].message_id
    world.wait_state(stage, "completed")
    before = world.job(id)
    # And the first one wakes
    first.thaw()
    wait_until(lambda: "taken over" in first.text() or "refused" in first.text(), what="the stale run is told")
    marker = world.app.quick.send("after")
    world.wait_state(marker.message_id, "completed")
    # Then nothing has changed, and nothing was sent twice
    assert world.job(id) == before
    assert world.journal.count("on_success", id) == 1
    assert world.journal.count("begin", stage) == 1


def test_a_deployment_neither_fails_nor_charges_a_job_without_retries(world: World) -> None:
    """B29, H49: SIGTERM at ``max_retries=0``: interrupted, not failed."""
    # Given a job without retries that is interrupted by shutdowns
    first = world.fleet.start()
    job = world.app.interruptible.send("go")
    world.wait_begun(job.message_id)
    # When its worker is told to stop
    first.terminate()
    assert first.wait(30) == 0
    # Then the job is queued again and nothing is charged
    row = world.job(job.message_id)
    assert (row.state, row.attempt, row.retries, row.interruptions) == ("queued", 0, 0, 1)
    # And it runs on the next worker
    world.fleet.touch("go")
    world.fleet.start()
    row = world.wait_state(job.message_id, "completed")
    assert row.attempt == 1
    world.assert_kept()


def test_a_stopping_worker_gives_its_waiting_claims_back_at_once(world: World) -> None:
    """Crash matrix "worker stopped (SIGTERM)": claims are released before messages are requeued."""
    # Given one busy thread and messages that wait behind it in memory
    first = world.fleet.start(threads=1)
    busy = world.app.slow.send(2)
    world.wait_begun(busy.message_id)
    waiting = world.app.quick.send(1)
    wait_until(lambda: world.state(waiting.message_id) == "active", what="the waiting job is claimed")
    # When the worker stops
    first.terminate()
    assert first.wait(30) == 0
    # Then the running job is finished and the waiting one free, with nothing charged
    assert world.state(busy.message_id) == "completed"
    row = world.job(waiting.message_id)
    assert (row.state, row.attempt, row.lost_claims) == ("queued", 0, 0)
    world.fleet.start()
    world.wait_state(waiting.message_id, "completed")


def test_a_send_of_a_running_job_is_not_repeated_by_its_rerun(world: World) -> None:
    """DESIGN 6: ids of children are derived, so that a rerun sends nothing twice."""
    first = world.fleet.start()
    job = world.app.parent.send(3, "go")
    wait_until(lambda: world.journal.count("sent", job.message_id) == 1, what="the children are sent")
    world.fleet.kill(first)
    world.fleet.start()
    wait_until(lambda: world.journal.count("sent", job.message_id) == 2, 40, "the rerun has sent")
    world.fleet.touch("go")
    world.wait_state(job.message_id, "completed")
    wait_until(lambda: reading.counts(world.db) == {"completed": 4}, 40, "three children, and no more")


def test_a_job_far_longer_than_its_lease_runs_once_whatever_is_delivered(world: World) -> None:
    """B17, B24: a lease is renewed while the job runs, and copies are acknowledged without effect."""
    world.fleet.start()
    world.fleet.start()
    job = world.app.slow.send(7)
    world.wait_begun(job.message_id)
    for _ in range(5):
        world.deliver_again(job)
    world.wait_state(job.message_id, "completed")
    assert world.journal.count("begin", job.message_id) == 1
