"""A message is only a hint: copies, late ones, strange ones."""

from __future__ import annotations

import uuid

import dramatiq
import pytest

from dramatiq_durable.runtime.messages import MARK
from tests.acceptance.conftest import World, only_sqlite
from tests.servers import wait_until


def test_sending_the_same_message_again_does_nothing(world: World) -> None:
    """B18, B21: one row, one message in the broker, one run."""
    # Given a message that is sent twice before any worker is there
    message = world.app.quick.message("once")
    world.app.broker.enqueue(message)
    world.app.broker.enqueue(message)
    with world.valkey.client() as client:
        assert client.llen("dramatiq:default") == 1
    # When a worker runs it, and it is sent a third time
    world.fleet.start()
    before = world.wait_state(message.message_id, "completed")
    world.app.broker.enqueue(message)
    marker = world.app.quick.send("after")
    world.wait_state(marker.message_id, "completed")
    world.wait_idle()
    # Then it has run once, and the third time has changed nothing
    assert world.journal.count("begin", message.message_id) == 1
    assert world.job(message.message_id) == before
    assert world.counts() == {"completed": 2}


def test_copies_in_the_broker_run_once_and_leave_the_result_alone(world: World) -> None:
    """H9, B18, B55: N deliveries, one run; a skipped copy does not overwrite the result with None."""
    # Given a job with many copies in the broker, and two workers
    message = world.app.held_result.send("go", {"answer": 42})
    for _ in range(4):
        world.deliver_again(message)
    world.fleet.start()
    world.fleet.start()
    world.wait_begun(message.message_id)
    # And more copies while it runs
    for _ in range(4):
        world.deliver_again(message)
    world.fleet.touch("go")
    assert message.get_result(backend=world.app.results, block=True, timeout=30_000) == {"answer": 42}
    # And more copies when it is finished
    for _ in range(4):
        world.deliver_again(message)
    # Then every copy is acknowledged, it has run once, and its result is what it was
    world.wait_idle()
    assert world.journal.count("begin", message.message_id) == 1
    assert message.get_result(backend=world.app.results) == {"answer": 42}
    assert world.job(message.message_id).attempt == 1
    with world.valkey.client() as client:
        assert not client.exists("dramatiq:default.XQ")


def test_a_late_copy_of_a_failed_job_does_nothing(world: World) -> None:
    """DESIGN 3: a final state is final for workers, a failed one too; its stored exception stays."""
    world.fleet.start()
    message = world.app.breaks.send("the first error")
    before = world.wait_state(message.message_id, "failed")
    world.wait_idle()
    world.deliver_again(message)
    world.wait_idle()
    assert world.job(message.message_id) == before
    assert world.journal.count("begin", message.message_id) == 1
    with pytest.raises(dramatiq.results.ResultFailure, match="the first error"):
        message.get_result(backend=world.app.results)


def test_a_marked_message_without_a_row_is_parked_and_never_run(world: World) -> None:
    """P11: a late message of a pruned job."""
    world.fleet.start()
    message = world.app.quick.message("pruned").copy(options={MARK: 1})
    world.deliver_again(message)
    row = world.wait_state_of_new(message.message_id, "parked")
    assert row.reason == "no_row"
    # And it stays parked, although its actor is known here
    marker = world.app.quick.send("after")
    world.wait_state(marker.message_id, "completed")
    world.wait_idle()
    world.wait_looks()
    assert world.state(message.message_id) == "parked"
    assert world.journal.count("begin", message.message_id) == 0


def test_a_message_of_an_unequipped_process_is_adopted_and_run_once(world: World) -> None:
    """DESIGN 4 (P11), issue "bad input": adopted and counted; a copy of it is a duplicate like any other."""
    world.fleet.start()
    message = world.app.quick.message("adopted")
    world.deliver_again(message)
    world.deliver_again(message)
    row = world.wait_state_of_new(message.message_id, "completed")
    assert row.origin == "adopted"
    assert message.get_result(backend=world.app.results, block=True, timeout=30_000) == "adopted"
    world.wait_idle()
    assert world.journal.count("begin", message.message_id) == 1


@only_sqlite
def test_adopted_and_parked_messages_and_duplicates_are_counted(world: World) -> None:
    """Issue "bad input": people must be able to see that a sender is not equipped."""
    counters = world.app.broker.durable.engine.counters
    worker = dramatiq.Worker(world.app.broker, worker_threads=2, worker_timeout=100)
    worker.start()
    try:
        stranger = world.app.quick.message("adopted")
        world.deliver_again(stranger)
        world.wait_state_of_new(stranger.message_id, "completed")
        world.wait_idle()
        world.deliver_again(stranger)
        pruned = world.app.quick.message("pruned").copy(options={MARK: 1})
        world.deliver_again(pruned)
        world.wait_state_of_new(pruned.message_id, "parked")
        world.deliver(b"rubbish")
        wait_until(world.undecodable, what="the rubbish is kept")
        world.wait_idle()
    finally:
        worker.stop()
    assert (counters.adopted, counters.parked, counters.undecodable) == (1, 1, 1)
    assert counters.duplicates >= 1


def test_an_adopted_message_that_was_delayed_waits_in_the_record(world: World) -> None:
    """DESIGN 8: far-future messages of before the installation are moved to rows when met."""
    # Given a message that an unequipped process has sent with a delay
    plain = world.plain_broker()
    far = plain.enqueue(world.app.quick.message("far"), delay=3_600_000)
    near = plain.enqueue(world.app.quick.message("near"), delay=1_500)
    # When a worker meets it
    world.fleet.start()
    # Then the near one runs, and the far one waits in the record and no longer in the broker
    world.wait_state_of_new(near.message_id, "completed")
    row = world.wait_state_of_new(far.message_id, "scheduled")
    assert row.publish_at == pytest.approx(far.options["eta"], abs=1)
    with world.valkey.client() as client:
        wait_until(lambda: not client.hlen("dramatiq:default.DQ.msgs"), what="the delay queue is empty")
    assert world.journal.count("begin", near.message_id) == 1


def test_an_adopted_message_survives_the_death_of_its_worker(world: World) -> None:
    """P2 for adopted jobs: from the adoption on, the row is the record."""
    first = world.fleet.start()
    message = world.app.held.message("go")
    world.deliver_again(message)
    world.wait_begun(message.message_id)
    world.fleet.kill(first)
    world.valkey.flush()
    world.fleet.touch("go")
    world.fleet.start()
    world.wait_state(message.message_id, "completed")
    world.assert_kept()


@only_sqlite
def test_messages_are_not_adopted_where_that_is_switched_off(world: World) -> None:
    """Setting ``adopt``: recorded and parked, not run."""
    world.fleet.start(DRAMATIQ_DURABLE_ADOPT="false")
    message = world.app.quick.message("stranger")
    world.deliver_again(message)
    assert world.wait_state_of_new(message.message_id, "parked").reason == "not_adopted"
    world.wait_idle()
    assert world.journal.count("begin", message.message_id) == 0


def test_an_undecodable_payload_is_kept_and_its_neighbours_run(world: World) -> None:
    """H29, B3: the bytes are in a table of their own; the rest of the fetched batch is not lost."""
    # Given rubbish among proper messages, all fetched together
    before = [world.app.quick.send(i) for i in range(3)]
    rubbish = [b"\x80\x04this is no message\x00\xff", b'{"half": ', b""]
    refs = [world.deliver(data) for data in rubbish]
    after = [world.app.quick.send(i) for i in range(3)]
    # When a worker fetches it
    world.fleet.start()
    # Then the proper ones run, once each
    for message in (*before, *after):
        world.wait_state(message.message_id, "completed")
        assert world.journal.count("begin", message.message_id) == 1
    # And the rubbish is kept, byte for byte, and gone from the broker
    wait_until(lambda: len(world.undecodable()) == len(rubbish), what="all are kept")
    assert {row["payload"] for row in world.undecodable()} == set(rubbish)
    world.wait_idle()
    assert not any(world.in_broker(ref) for ref in refs)
    # And the same bytes again are counted, not kept twice
    world.deliver(rubbish[0])
    wait_until(lambda: {row["times"] for row in world.undecodable()} == {1, 2}, what="it is counted")
    world.wait_idle()


def test_an_unknown_actor_is_parked_and_runs_when_a_worker_knows_it(world: World) -> None:
    """H39, B12: a rolling deployment does not fail the new release's jobs on old workers."""
    # Given an old worker, and a job of the new release
    world.fleet.start()
    message = dramatiq.Message("default", "newcomer", (), {}, {}, message_id=str(uuid.uuid4()))
    world.app.broker.enqueue(message)
    assert world.wait_state(message.message_id, "parked").reason == "unknown_actor"
    world.wait_idle()
    with world.valkey.client() as client:
        assert not client.exists("dramatiq:default.XQ")
    # When a new worker boots beside it
    world.fleet.workers[0].terminate()
    world.fleet.start(DURABLE_TEST_NEWER="1")
    world.fleet.workers[0].wait()
    # Then the job runs
    row = world.wait_state(message.message_id, "completed")
    assert (row.attempt, row.retries) == (1, 0)
    assert world.journal.count("begin", message.message_id) == 1
