"""A broker that loses everything, restarts, is cut off, or loses one reply."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from dramatiq_durable.errors import NotPublished
from dramatiq_durable.store import reading
from tests.acceptance.conftest import World, only_sqlite
from tests.harness.proxy import Proxy
from tests.servers import wait_until


def test_a_flush_loses_no_queued_delayed_or_running_job(world: World) -> None:
    """P2, B14: everything that is not finished is published again, and runs once."""
    # Given jobs that run, wait in the queue, wait for a retry, and wait for their time
    first = world.fleet.start(threads=2)
    running = [world.app.held.send("go") for _ in range(2)]
    for message in running:
        world.wait_begun(message.message_id)
    queued = [world.app.quick.send(i) for i in range(20)]
    delayed = [world.app.quick.send_with_options(args=(i,), delay=2_000) for i in range(3)]
    # When the broker loses everything
    world.valkey.flush()
    world.fleet.touch("go")
    # Then all of them run, once each
    for message in (*running, *queued, *delayed):
        world.wait_state(message.message_id, "completed")
        assert world.journal.count("begin", message.message_id) == 1
    assert not first.dead()
    world.assert_kept()


def test_a_flush_while_no_worker_runs_is_put_right_at_the_next_boot(world: World) -> None:
    """P2, B14: reconciliation at boot."""
    messages = [world.app.quick.send(i) for i in range(10)]
    world.valkey.flush()
    world.fleet.start()
    for message in messages:
        world.wait_state(message.message_id, "completed")
        assert world.journal.count("begin", message.message_id) == 1
    assert sum(world.job(message.message_id).put_back for message in messages) == 10


@pytest.mark.own_valkey
@pytest.mark.persist
def test_a_delayed_job_runs_after_a_restart_of_the_broker_with_the_worker_alive(world: World) -> None:
    """B2, H26, celery 1307: exactly once, and without a restart of the worker."""
    # Given a delayed job, and a worker that has seen the broker
    worker = world.fleet.start()
    first = world.app.quick.send("before")
    world.wait_state(first.message_id, "completed")
    delayed = world.app.quick.send_with_options(args=("delayed",), delay=2_500)
    # When the broker restarts before it is due
    world.valkey.restart()
    assert world.state(delayed.message_id) == "scheduled"
    # Then it runs, once, on the same worker
    row = world.wait_state(delayed.message_id, "completed")
    assert world.journal.count("begin", delayed.message_id) == 1
    assert row.attempt == 1
    assert not worker.dead()


@pytest.mark.own_valkey
def test_jobs_survive_a_broker_that_comes_back_empty(world: World) -> None:
    """P2: a failover to a replica without data, while jobs run and wait."""
    worker = world.fleet.start(threads=2)
    running = [world.app.held.send("go") for _ in range(2)]
    for message in running:
        world.wait_begun(message.message_id)
    queued = [world.app.quick.send(i) for i in range(10)]
    world.valkey.kill()
    world.fleet.touch("go")
    for message in running:
        # Their outcome is committed while the broker is away.
        world.wait_state(message.message_id, "completed")
    world.valkey.start()
    for message in queued:
        world.wait_state(message.message_id, "completed")
    for message in (*running, *queued):
        assert world.journal.count("begin", message.message_id) == 1
    assert not worker.dead()


def test_a_retry_whose_publish_fails_is_kept_and_runs_later(world: World, broker_link: Proxy) -> None:
    """B1, H45, PR 545: the retry is a row with its error, not a message that may be lost."""
    # Given a job that runs, and then a broker that is cut off
    worker = world.fleet.start()
    message = world.app.held_flaky.send("go")
    world.wait_begun(message.message_id)
    broker_link.cut()
    # When the job fails and is to be tried again
    world.fleet.touch("go")
    wait_until(lambda: world.job(message.message_id).retries == 1, what="the retry is recorded")
    row = world.job(message.message_id)
    assert row.state in ("scheduled", "queued")
    assert row.attempt == 1
    attempts = reading.attempts(world.db, message.message_id)
    assert [(a.ended, a.error_type, a.error_message) for a in attempts] == [
        ("retry", "RuntimeError", "failed while the broker was away")
    ]
    assert "RuntimeError" in (attempts[0].traceback or "")
    world.wait_said(worker, "not taken by the broker")
    # Then it is tried again when the broker is back, once
    broker_link.restore()
    row = world.wait_state(message.message_id, "completed")
    assert (row.attempt, row.retries) == (2, 1)
    assert world.journal.count("begin", message.message_id) == 2
    world.assert_kept()


def test_a_send_while_the_broker_is_away_is_recorded_and_published_later(world: World, broker_link: Proxy) -> None:
    """B13, crash matrix "after INSERT, before or during publish": a warning and a count, and the job runs."""
    broker_link.cut()
    message = world.app.quick.send("kept")
    assert world.state(message.message_id) == "queued"
    assert world.app.broker.durable.engine.counters.publish_failures == 1
    broker_link.restore()
    world.fleet.start()
    row = world.wait_state(message.message_id, "completed")
    assert row.put_back == 0
    assert world.journal.count("begin", message.message_id) == 1


@only_sqlite
@pytest.mark.settings(ON_PUBLISH_ERROR="raise")
def test_a_send_while_the_broker_is_away_may_raise_instead(world: World, broker_link: Proxy) -> None:
    """``on_publish_error="raise"``: the error says that the job is recorded and will be published."""
    broker_link.cut()
    message = world.app.quick.message("kept")
    with pytest.raises(NotPublished, match="is recorded.*publishes it when the broker is back"):
        world.app.broker.enqueue(message)
    broker_link.restore()
    world.fleet.start()
    world.wait_state(message.message_id, "completed")


@only_sqlite
def test_a_publish_whose_reply_is_lost_leads_to_one_run(world: World, broker_link: Proxy) -> None:
    """H17: the broker has the message and we do not know; the row is published again, and the claim absorbs it."""
    broker_link.swallow("replies")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(world.app.quick.send, "once")
        wait_until(lambda: broker_link.swallowed["replies"], what="the reply is lost")
        broker_link.restore()
        message = sending.result(timeout=30)
    world.fleet.start()
    world.wait_state(message.message_id, "completed")
    world.wait_idle()
    assert world.journal.count("begin", message.message_id) == 1


def test_messages_of_a_fetch_whose_reply_was_lost_are_put_back(world: World) -> None:
    """B3, H28: the batch is in the acks of a worker that lives and knows nothing of it."""
    # Given a worker, and messages that the broker believes to be in its hands
    worker = world.fleet.start()
    messages = [world.send_past(world.app.quick.message(i), stranded=True) for i in range(3)]
    # Then all of them run, once, and the broker forgets the copies that nobody will acknowledge
    for message in messages:
        world.wait_state(message.message_id, "completed")
        assert world.journal.count("begin", message.message_id) == 1
    assert not worker.dead()
    world.wait_idle()


@only_sqlite
def test_stranded_copies_that_no_row_waits_for_are_fetched_again(world: World) -> None:
    """B3, H28: a late copy leaves the broker, and a job that nobody has recorded runs, though the reply was lost."""
    # Given a finished job, and a living worker
    world.fleet.start()
    done = world.app.quick.send("done")
    world.wait_state(done.message_id, "completed")
    world.wait_idle()
    # When one more copy of it, and a message of a process that is not equipped, are stranded
    plain = world.app.quick.message("plain")
    for message in (done, plain):
        ref = str(uuid.uuid4())
        world.deliver(message.copy(options={"redis_message_id": ref}).encode(), ref=ref, stranded=True)
    # Then the broker forgets the copy, and the message becomes a job
    world.wait_state_of_new(plain.message_id, "completed")
    world.wait_idle()
    assert world.journal.count("begin", done.message_id) == 1
    assert world.journal.count("begin", plain.message_id) == 1


@only_sqlite
def test_a_broker_that_hangs_until_its_client_gives_up_costs_nothing(world: World) -> None:
    """B4, H27, PR 895: an immediate and a delayed job run after a stall; no consumer thread has died of it."""
    worker = world.fleet.start()
    before = world.app.quick.send("before")
    world.wait_state(before.message_id, "completed")
    delayed = world.app.quick.send_with_options(args=("delayed",), delay=500)
    world.valkey.freeze()
    try:
        wait_until(lambda: world.job(delayed.message_id).publish_at is None, what="it is due")
        world.wait_said(worker, "Timeout")
    finally:
        world.valkey.thaw()
    immediate = world.app.quick.send("after")
    for message in (delayed, immediate):
        world.wait_state(message.message_id, "completed")
        assert world.journal.count("begin", message.message_id) == 1
    assert not worker.dead()


@only_sqlite
def test_a_long_queue_that_waits_its_turn_is_not_published_again(world: World) -> None:
    """DESIGN 8: a backlog stays as many messages as it has jobs, however often it is looked at."""
    world.fleet.start(threads=1)
    blocker = world.app.held.send("go")
    world.wait_begun(blocker.message_id)
    backlog = [world.app.quick.send(i) for i in range(300)]
    world.wait_looks(3)
    with world.valkey.client() as client:
        assert client.hlen("dramatiq:default.msgs") == 301
    world.fleet.touch("go")
    wait_until(lambda: world.counts() == {"completed": 301}, 60, "all have run")
    assert {world.job(message.message_id).publishes for message in backlog} == {1}
