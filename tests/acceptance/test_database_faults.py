"""A record that is away, refused or silent: nothing is sent, started or acknowledged without it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from dramatiq.results import ResultMissing

from dramatiq_durable.errors import NotRecorded
from dramatiq_durable.store import reading
from tests.acceptance.conftest import World
from tests.harness.outage import DatabaseLink
from tests.servers import wait_until

#: The two ways in which a database is away; for a file there is only one.
outages = pytest.mark.parametrize(
    ("database_url", "begin"),
    [
        pytest.param("sqlite", DatabaseLink.cut, id="sqlite-locked"),
        pytest.param("postgresql", DatabaseLink.cut, id="postgresql-refused"),
        pytest.param("postgresql", DatabaseLink.silence, id="postgresql-silent"),
    ],
    indirect=["database_url"],
)

Outage = Callable[[DatabaseLink], None]


def test_a_send_without_the_record_raises_and_queues_nothing(world: World, database_link: DatabaseLink) -> None:
    """H1, P1, crash matrix "before the INSERT commits": ``send()`` raises, naming the job; the broker sees nothing."""
    database_link.cut()
    for send in (
        lambda message: world.app.broker.enqueue(message),
        lambda message: world.app.broker.enqueue(message, delay=1_000),
    ):
        message = world.app.quick.message("never")
        with pytest.raises(NotRecorded, match=f"{message.message_id}.*nothing was queued") as caught:
            send(message)
        assert caught.value.job_id == message.message_id
    with world.valkey.client() as client:
        assert client.keys("*:default*") == []
    # And when the database is back, there is no row either, and sending works
    database_link.restore()
    assert world.counts() == {}
    world.fleet.start()
    world.wait_state(world.app.quick.send("now").message_id, "completed")


@outages
@pytest.mark.settings(RECONCILE_INTERVAL="60000", PUBLISH_GRACE="60000")
def test_nothing_is_started_while_the_record_is_away(world: World, database_link: DatabaseLink, begin: Outage) -> None:
    """H2, P10: a fetched message waits for its claim, and is run when the database is back."""
    # Given a recorded job whose message is on its way, and a worker that is ready for it
    message = world.app.quick.send("waits")
    world.valkey.flush()
    worker = world.fleet.start()
    world.wait_state(world.app.quick.send("ready").message_id, "completed")
    world.wait_idle()
    # When the database goes away, and then the message arrives
    begin(database_link)
    ref = world.deliver_again(message)
    with world.valkey.client() as client:
        wait_until(lambda: not client.llen("dramatiq:default"), what="the message is fetched")
    world.wait_said(worker, "could not be renewed") if begin is DatabaseLink.cut else None
    # Then nothing runs, and the message is not acknowledged
    assert world.journal.count("begin", message.message_id) == 0
    assert world.in_broker(ref)
    # And when it is back, the job runs, once
    database_link.restore()
    row = world.wait_state(message.message_id, "completed")
    assert row.attempt == 1
    assert world.journal.count("begin", message.message_id) == 1
    assert not worker.dead()
    world.wait_idle()


@outages
def test_a_worker_that_boots_without_the_record_fetches_nothing_until_it_is_there(
    world: World, database_link: DatabaseLink, begin: Outage
) -> None:
    """P10: workers wait, and go on when the database is back."""
    message = world.app.quick.send("waits")
    begin(database_link)
    worker = world.fleet.start()
    with world.valkey.client() as client:
        wait_until(lambda: client.zcard("dramatiq:__heartbeats__") or "Nothing is fetched" in worker.text(), 10)
    assert world.journal.count("begin", message.message_id) == 0
    database_link.restore()
    world.wait_state(message.message_id, "completed")
    assert world.journal.count("begin", message.message_id) == 1


@outages
def test_no_job_is_acknowledged_without_its_outcome(world: World, database_link: DatabaseLink, begin: Outage) -> None:
    """H4, P10: an outcome that cannot be written is kept; the message stays until it is committed."""
    # Given a running job whose database goes away
    worker = world.fleet.start()
    message = world.app.held_result.send("go", "value")
    world.wait_begun(message.message_id)
    ref = world.job(message.message_id).broker_ref
    assert ref is not None
    begin(database_link)
    # When the job ends
    world.fleet.touch("go")
    wait_until(lambda: world.journal.count("end", message.message_id) == 1, what="the job has ended")
    if begin is DatabaseLink.cut:
        world.wait_said(worker, "outcomes wait for the database", times=2)
    # Then its message is still there, and so is no result
    assert world.in_broker(ref)
    assert world.state(message.message_id) == "active"
    with pytest.raises(ResultMissing):
        message.get_result(backend=world.app.results)
    # And when the database is back the outcome is committed, and then the message acknowledged
    database_link.restore()
    row = world.wait_state(message.message_id, "completed")
    assert (row.attempt, row.lost) == (1, 0)
    assert message.get_result(backend=world.app.results, block=True, timeout=30_000) == "value"
    world.wait_idle()
    assert world.journal.count("begin", message.message_id) == 1
    assert not worker.dead()


def test_an_outage_longer_than_a_lease_costs_nobody_a_job(world: World, database_link: DatabaseLink) -> None:
    """P3: no taking-over until the reconciler has seen the database for one whole lease."""
    # Given jobs that run in two workers
    for _ in range(2):
        world.fleet.start(threads=4)
    messages = [world.app.held.send("go") for _ in range(4)]
    for message in messages:
        world.wait_begun(message.message_id)
    # When the database is away for longer than their leases
    database_link.cut()
    leases = [world.job(message.message_id).lease_until or 0 for message in messages]
    wait_until(lambda: time.time() * 1000 > max(leases) + 1_500, what="all leases have run out")
    database_link.restore()
    # Then nobody takes them: their owners renew them
    wait_until(
        lambda: all((world.job(m.message_id).lease_until or 0) > max(leases) for m in messages), what="all are renewed"
    )
    world.wait_looks(2)
    world.fleet.touch("go")
    for message in messages:
        row = world.wait_state(message.message_id, "completed")
        assert (row.attempt, row.lost, row.lost_claims) == (1, 0, 0)
        assert world.journal.count("begin", message.message_id) == 1


@outages
@pytest.mark.settings(SHUTDOWN_TIMEOUT="5000")
def test_a_worker_stops_within_seconds_while_the_record_is_away(
    world: World, database_link: DatabaseLink, begin: Outage
) -> None:
    """P10: within 5 s of SIGTERM, with a job that has ended, one in hand and one on its way; none is acknowledged."""
    # Given a worker with outcomes that it cannot write, a claim in hand, and one that it cannot make
    worker = world.fleet.start(threads=2)
    ended = [world.app.held.send("go") for _ in range(2)]
    for message in ended:
        world.wait_begun(message.message_id)
    waiting = world.app.quick.send("waiting")
    wait_until(lambda: world.state(waiting.message_id) == "active", what="it is claimed")
    begin(database_link)
    world.fleet.touch("go")
    wait_until(lambda: world.journal.count("end") >= 2, what="the jobs have ended")
    late = world.app.quick.message("late")
    ref = world.deliver_again(late)
    with world.valkey.client() as client:
        wait_until(lambda: not client.llen("dramatiq:default"), what="it is fetched")
    # When it is told to stop
    since = time.monotonic()
    worker.terminate()
    worker.wait(60)
    took = time.monotonic() - since
    # Then it stops soon, and no message is gone without its outcome
    refs = [world.job(message.message_id).broker_ref for message in (*ended, waiting)]
    assert all(world.in_broker(each) for each in (*refs, ref))
    assert took < 8, f"it took {took:.1f} s\n{worker.text()[-3000:]}"
    # And everything completes when the database is back
    database_link.restore()
    world.fleet.start()
    for message in (*ended, waiting):
        world.wait_state(message.message_id, "completed")
    world.wait_state_of_new(late.message_id, "completed")


def test_a_claimed_job_does_not_start_when_the_record_is_known_to_be_away(
    world: World, database_link: DatabaseLink
) -> None:
    """P10: its lease is good for a while yet, but its outcome could not be written."""
    # Given a busy thread, a job that waits behind it, and a database that goes away
    worker = world.fleet.start(threads=1, DRAMATIQ_DURABLE_LEASE="60000")
    busy = world.app.held.send("go")
    world.wait_begun(busy.message_id)
    waiting = world.app.quick.send("waiting")
    wait_until(lambda: world.state(waiting.message_id) == "active", what="it is claimed")
    database_link.cut()
    world.wait_said(worker, "could not be renewed")
    # When the thread is free
    world.fleet.touch("go")
    wait_until(lambda: world.journal.count("end", busy.message_id) == 1, what="the first job has ended")
    world.wait_said(worker, "could not be renewed", times=worker.text().count("could not be renewed") + 1)
    # Then the other one waits for the database
    assert world.journal.count("begin", waiting.message_id) == 0
    database_link.restore()
    row = world.wait_state(waiting.message_id, "completed")
    assert (row.attempt, row.lost_claims) == (1, 0)
    assert world.journal.count("begin", waiting.message_id) == 1
    assert world.wait_state(busy.message_id, "completed").attempt == 1


def test_a_start_that_cannot_be_written_lets_nothing_run(world: World, database_link: DatabaseLink) -> None:
    """P10: the start of an actor with ``on_lost`` is committed before it runs; without the database it waits."""
    # Given a claimed job that has not begun, of an actor that must not be started twice
    world.fleet.touch("gate")
    world.fleet.start()
    message = world.app.once.send("go")
    world.fleet.touch("go")
    wait_until(lambda: world.journal.count("gated", message.message_id), what="it is claimed")
    # When the database is away as it begins
    database_link.cut()
    world.fleet.remove("gate")
    marker = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > marker or world.journal.count("begin", message.message_id))
    # Then it does not run before the database is back
    assert world.journal.count("begin", message.message_id) == 0
    database_link.restore()
    row = world.wait_state(message.message_id, "completed")
    assert row.attempt == 1
    assert world.journal.count("begin", message.message_id) == 1


def test_a_child_that_cannot_be_recorded_fails_its_parent_and_not_silently(
    world: World, database_link: DatabaseLink
) -> None:
    """P1 inside a job: ``send()`` raises there too; the retry sends every child, each once."""
    world.fleet.touch("hold")
    world.fleet.start()
    message = world.app.late_parent.send(3, "go")
    world.wait_begun(message.message_id)
    database_link.cut()
    world.fleet.touch("go")
    wait_until(lambda: world.journal.count("raised", message.message_id) == 1, 60, "the send has raised")
    assert world.journal.events("raised", message.message_id)[0].detail == "NotRecorded"
    database_link.restore()
    row = world.wait_state(message.message_id, "completed")
    assert row.retries == 1
    wait_until(lambda: world.counts() == {"completed": 4}, 40, "three children, and no more")
    assert [a.error_type for a in reading.attempts(world.db, message.message_id)] == [
        "dramatiq_durable.errors.NotRecorded"
    ]
