"""What ``send()`` accepts, refuses and promises."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dramatiq_durable.errors import NotEncodable, PayloadTooLarge
from dramatiq_durable.store import reading
from tests.acceptance.conftest import World, only_sqlite
from tests.servers import wait_until


@only_sqlite
@pytest.mark.parametrize("delay", [None, 1_000], ids=["now", "later"])
def test_arguments_that_cannot_be_encoded_leave_neither_row_nor_message(world: World, delay: int | None) -> None:
    """H18: refused at ``send()``, not recorded as a job that nobody can ever publish."""
    with pytest.raises(NotEncodable, match="quick.*was not queued.*cannot be encoded") as caught:
        world.app.quick.send_with_options(args=(threading.Lock(),), delay=delay)
    assert isinstance(caught.value, TypeError)
    assert world.counts() == {}
    with world.valkey.client() as client:
        assert client.keys("*:default*") == []


@only_sqlite
@pytest.mark.parametrize("delay", [None, 1_000], ids=["now", "later"])
@pytest.mark.settings(MAX_PAYLOAD="2000")
def test_arguments_over_the_limit_leave_neither_row_nor_message(world: World, delay: int | None) -> None:
    """Issue "bad input": oversized arguments are refused, with both sizes in the error."""
    with pytest.raises(PayloadTooLarge, match=r"was not queued: its message has 2\d\d\d bytes and the limit is 2000"):
        world.app.quick.send_with_options(args=("x" * 2000,), delay=delay)
    assert world.counts() == {}
    with world.valkey.client() as client:
        assert client.keys("*:default*") == []
    world.app.quick.send("x" * 1000)
    assert world.counts() == {"queued": 1}


@only_sqlite
@pytest.mark.parametrize("delay", ["soon", -5, float("nan"), True], ids=repr)
def test_a_delay_that_makes_no_sense_is_refused_or_means_now(world: World, delay: Any) -> None:
    """Bad input: whatever is given as a delay, there is either an error and no row, or a row that can run."""
    message = world.app.quick.message("odd")
    try:
        world.app.broker.enqueue(message, delay=delay)
    except (ValueError, TypeError):
        assert world.counts() == {}
    else:
        assert world.state(message.message_id) in ("queued", "scheduled")


@only_sqlite
def test_sends_from_many_threads_are_all_recorded_and_run_once(world: World) -> None:
    """P1, P2: 8 threads, 20 jobs each, while a worker runs."""
    world.fleet.start()
    sent: list[str] = []

    def send(n: int) -> None:
        for i in range(20):
            sent.append(world.app.quick.send(f"{n}-{i}").message_id)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == 160
    wait_until(lambda: world.counts() == {"completed": 160}, 60, "all have run")
    assert world.journal.count("begin") == 160
    world.assert_kept()


def test_delays_are_kept(world: World) -> None:
    """DESIGN 8: not early, and at most 1 s late; in the record and not in the broker meanwhile."""
    # Given a worker, and jobs with delays; a far one before the near ones (H37)
    world.fleet.start()
    far = world.app.quick.send_with_options(args=("far",), delay=365 * 86_400_000)
    sent = {delay: world.app.quick.send_with_options(args=(delay,), delay=delay) for delay in (2_000, 500, 1_000)}
    assert {world.state(message.message_id) for message in sent.values()} == {"scheduled"}
    with world.valkey.client() as client:
        assert not client.exists("dramatiq:default.DQ.msgs", "dramatiq:default.msgs")
    # Then each is handed to the broker when it is due, by the database's clock
    for delay, message in sent.items():
        row = world.wait_state(message.message_id, "completed")
        assert row.published_at is not None
        assert row.published_at - row.created_at >= delay
        assert row.published_at - row.created_at <= delay + 1_000
        assert world.journal.count("begin", message.message_id) == 1
    # And the far one waits
    assert world.state(far.message_id) == "scheduled"


def test_a_delay_of_nothing_runs_at_once(world: World) -> None:
    """H20: ``delay=0`` is not a detour over a delay queue."""
    message = world.app.quick.send_with_options(args=("now",), delay=0)
    assert world.state(message.message_id) == "queued"
    with world.valkey.client() as client:
        assert client.llen("dramatiq:default") == 1
    world.fleet.start()
    world.wait_state(message.message_id, "completed")


def test_delayed_jobs_of_a_dead_sender_are_published_by_any_worker(world: World) -> None:
    """P2: a process that only sends leaves nothing but rows behind."""
    message = world.app.quick.send_with_options(args=("later",), delay=300)
    time_due = world.job(message.message_id).publish_at
    assert time_due is not None
    wait_until(lambda: time.time() * 1000 > time_due, what="it is due")
    assert world.state(message.message_id) == "scheduled"
    world.fleet.start()
    world.wait_state(message.message_id, "completed")


def test_retries_are_those_of_dramatiq_and_each_leaves_its_error(world: World) -> None:
    """B56, stock semantics: ``max_retries=3`` is four attempts; each error is in the record."""
    world.fleet.start()
    # Given a job that fails twice, and one that fails always
    heals = world.app.flaky.send(2)
    fails = world.app.flaky.send(99)
    # Then one completes with its third attempt, the other fails with its fourth
    row = world.wait_state(heals.message_id, "completed")
    assert (row.attempt, row.retries) == (3, 2)
    row = world.wait_state(fails.message_id, "failed")
    assert (row.attempt, row.retries, row.reason) == (4, 3, "error")
    for message, ends in ((heals, ["retry"] * 2), (fails, ["retry"] * 3 + ["failed"])):
        attempts = reading.attempts(world.db, message.message_id)
        assert [a.ended for a in attempts] == ends
        assert [a.attempt for a in attempts] == list(range(1, len(ends) + 1))
        assert {a.error_message for a in attempts} == {"flaky on purpose"}
        assert all("flaky on purpose" in (a.traceback or "") for a in attempts)
    assert world.journal.count("begin", heals.message_id) == 3
    assert world.journal.count("begin", fails.message_id) == 4
    world.assert_kept()


def test_an_actor_without_retries_fails_at_once(world: World) -> None:
    """B56: the last error is there with ``max_retries=0`` too."""
    world.fleet.start()
    message = world.app.breaks.send("only once")
    row = world.wait_state(message.message_id, "failed")
    assert (row.attempt, row.retries) == (1, 0)
    assert [(a.ended, a.error_type, a.error_message) for a in reading.attempts(world.db, message.message_id)] == [
        ("failed", "ValueError", "only once")
    ]


def test_a_job_that_asks_to_run_again_later_does(world: World) -> None:
    """DESIGN 6: enqueueing one's own message means "run again later"; it is no failure."""
    world.fleet.start()
    message = world.app.again.send(3)
    row = world.wait_state(message.message_id, "completed")
    assert (row.attempt, row.retries) == (3, 0)
    assert world.counts() == {"completed": 1}
    assert world.journal.count("begin", message.message_id) == 3
    assert [a.ended for a in reading.attempts(world.db, message.message_id)] == ["retry", "retry"]
