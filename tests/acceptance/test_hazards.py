"""Hazards of brokers, prefetching, heartbeats and clocks, in real workers; each test names the one it is about."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker, _RedisConsumer

import dramatiq_durable as durable
from dramatiq_durable.runtime.sweeper import Sweeper
from dramatiq_durable.store import jobs, reading
from dramatiq_durable.store.dialects import Statement
from dramatiq_durable.store.types import NewJob
from tests.acceptance.conftest import World, only_sqlite
from tests.servers import Valkey, wait_until

_LEADER = Statement("look who leads", "SELECT owner FROM {leaders} WHERE name = 'reconciler'")


def test_a_long_job_among_full_queues_runs_once(world: World) -> None:
    """B17, H30: both prefetch windows full, so that Dramatiq sends no heartbeat; its timeout is two seconds."""
    # Given two workers that fetch one message at a time, a message that is due much later, and a long job
    world.fleet.env |= {
        "dramatiq_queue_prefetch": "1",
        "dramatiq_delay_queue_prefetch": "1",
        "DURABLE_TEST_HEARTBEAT_TIMEOUT": "2000",
    }
    later = world.app.quick.send_with_options(delay=600_000)
    world.fleet.start()
    world.fleet.start()
    job = world.app.slow.send(7)
    # When it runs far longer than the broker believes in its worker
    world.wait_begun(job.message_id)
    others = [world.app.quick.send(i) for i in range(20)]
    world.wait_state(job.message_id, "completed")
    # Then it has run once, and so has everything else
    for other in others:
        world.wait_state(other.message_id, "completed")
    assert world.journal.count("begin", job.message_id) == 1
    assert all(world.journal.count("begin", other.message_id) == 1 for other in others)
    assert world.state(later.message_id) == "scheduled"


@only_sqlite
def test_code_that_holds_the_interpreter_for_less_than_the_lease_runs_once(world: World) -> None:
    """H31: no thread of the process runs meanwhile, the heartbeat's neither; the lease is longer."""
    world.fleet.env["DURABLE_TEST_HEARTBEAT_TIMEOUT"] = "1000"
    world.fleet.start()
    world.fleet.start()
    job = world.app.grip.send(1.6)
    world.wait_state(job.message_id, "completed")
    assert world.journal.count("begin", job.message_id) == 1


@pytest.mark.parametrize("shift", [3600, -3600])
def test_a_host_whose_clock_is_an_hour_off_costs_nobody_a_job(world: World, shift: int) -> None:
    """H32: Dramatiq compares one host's clock with another's; leases know only the database's."""
    # Given a long job in one worker, and another one whose clock is wrong, which thinks the first one dead
    world.fleet.start()
    job = world.app.slow.send(5)
    world.wait_begun(job.message_id)
    world.fleet.start(DURABLE_TEST_CLOCK_SHIFT=str(shift), DURABLE_TEST_HEARTBEAT_TIMEOUT="2000")
    soon = world.app.quick.send_with_options(delay=500)
    # When both are at work
    world.wait_state(soon.message_id, "completed")
    world.wait_state(job.message_id, "completed")
    # Then everything runs once
    assert world.journal.count("begin", job.message_id) == 1
    assert world.journal.count("begin", soon.message_id) == 1


@only_sqlite
def test_what_a_dead_worker_had_fetched_comes_back_without_waiting_for_chance(world: World) -> None:
    """H34: Dramatiq gives it back with a chance of 0.1 % a command; a message without a row depends on that."""
    # Given a worker that dies after it has fetched the message of an unequipped process, before it has a row
    world.fleet.env["DURABLE_TEST_HEARTBEAT_TIMEOUT"] = "2000"
    first = world.fleet.start(ready=False, DURABLE_TEST_CRASH="before record_many kill")
    message = world.app.quick.message("foreign")
    world.plain_broker().enqueue(message)
    wait_until(first.dead, 40, "the worker is dead")
    assert reading.get_job(world.db, message.message_id) is None
    # When another worker is there, on a quiet system
    world.fleet.start()
    # Then it runs
    world.wait_state_of_new(message.message_id, "completed")


@only_sqlite
def test_a_server_that_forbids_keys_does_not_stop_reconciliation(world: World) -> None:
    """H35: Dramatiq's maintenance uses KEYS, which some providers forbid."""
    # Given a user without that right, and a job whose message is gone
    with world.valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-keys")
    broker = RedisBroker(url=f"redis://app:secret@127.0.0.1:{world.valkey.port}/0")
    handle = durable.install(broker, database_url=str(world.fleet.env["DRAMATIQ_DURABLE_DATABASE_URL"]))
    try:
        jobs.record(world.db, NewJob("lost", "default", "quick", "quick", b"{}", broker_ref="gone"))
        broker.declare_queue("default")
        with world.valkey.client() as client:
            client.zadd("dramatiq:__heartbeats__", {"somebody-dead": 1})
        time.sleep(handle.engine.options.publish_grace / 1000)
        # When it is looked for
        found = Sweeper(handle.engine, interval=1_000).look_once()
        # Then it is found missing, and the refusal is not ours to suffer
        assert found is not None and found.put_back == 1
    finally:
        handle.uninstall()
        broker.client.connection_pool.disconnect()


@only_sqlite
def test_an_acknowledgement_that_times_out_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """H40, B4: an error that is no connection error would make Dramatiq give up on the acknowledgement."""
    acknowledge, tries = _RedisConsumer.ack, []

    def slow(self: Any, message: Any) -> None:
        tries.append(message.message_id)
        if len(tries) < 3:
            raise redis.TimeoutError("too slow")
        acknowledge(self, message)

    monkeypatch.setattr(_RedisConsumer, "ack", slow)
    import dramatiq

    worker = dramatiq.Worker(world.app.broker, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        job = world.app.quick.send(1)
        world.wait_state(job.message_id, "completed")
        world.wait_idle()
        assert tries == [job.message_id] * 3
    finally:
        worker.stop()


def test_a_draining_worker_keeps_its_job_however_long_it_takes(world: World) -> None:
    """B33, H42: leases are renewed until the last job is done, not only until the stop begins."""
    # Given a long job in a worker that is told to stop, and another worker that would take it over
    first = world.fleet.start()
    job = world.app.slow.send(7)
    world.wait_begun(job.message_id)
    world.fleet.start()
    first.process.send_signal(signal.SIGTERM)
    # When it has drained for longer than its lease
    assert first.wait(40) == 0
    # Then the job is done, once
    row = world.job(job.message_id)
    assert (row.state, row.attempt, row.lost) == ("completed", 1, 0)
    assert world.journal.count("begin", job.message_id) == 1


def test_a_lost_run_counts_against_the_retries_of_the_job(world: World) -> None:
    """B35: the death of a process goes through the same policy as an exception, decided by the reconciler."""
    first = world.fleet.start()
    job = world.app.held.send("go")
    world.wait_begun(job.message_id)
    wait_until(lambda: world.job(job.message_id).started_at is not None, what="the start is noted")
    world.fleet.kill(first)
    world.fleet.touch("go")
    world.fleet.start()
    row = world.wait_state(job.message_id, "completed")
    assert (row.attempt, row.retries, row.lost) == (2, 1, 1)
    assert [a.ended for a in reading.attempts(world.db, job.message_id)] == ["lost"]


@pytest.mark.own_valkey
def test_reconciliation_goes_on_when_its_leader_is_killed(world: World, own_valkey: Valkey) -> None:
    """B28, B38: one process reconciles at a time, under a lease that runs out; it is no job of the queue that it "
    "repairs."""
    # Given two workers, of which one leads
    workers = [world.fleet.start(), world.fleet.start()]
    leader = wait_until(lambda: world.db.fetch(_LEADER), what="somebody leads")
    pids = {row.owner: row.pid for row in wait_until(lambda: reading.workers(world.db, 60_000), what="they enlist")}
    wait_until(lambda: len(reading.workers(world.db, 60_000)) == 2, what="both have enlisted")
    pids = {row.owner: row.pid for row in reading.workers(world.db, 60_000)}
    # When the leader is killed, and the broker forgets a job
    victim = next(w for w in workers if pids[leader[0][0]] in w.children())
    world.fleet.kill(victim)
    job = world.app.quick.send_with_options(delay=1_000)
    own_valkey.flush()
    # Then the other one leads, and the job runs
    wait_until(lambda: world.db.fetch(_LEADER) != leader, 40, "another one leads")
    world.wait_state(job.message_id, "completed")
