"""What Dramatiq's own pieces do goes on working: under its command, and under a plain ``Worker``."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator

import dramatiq
import pytest
from dramatiq import group, pipeline
from dramatiq.results import ResultFailure

from dramatiq_durable.runtime.messages import child_id
from tests.acceptance.conftest import World, only_sqlite
from tests.servers import free_port, wait_until

#: Under the command with each database, and under a plain Worker.
everywhere = pytest.mark.parametrize(
    ("database_url", "running"),
    [("sqlite", "command"), ("postgresql", "command"), ("sqlite", "worker")],
    indirect=True,
)


@pytest.fixture
def running(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """A world in which jobs are run: by the ``dramatiq`` command, or by a plain ``Worker`` in this process."""
    if request.param == "command":
        world.fleet.start()
        yield world
        return
    worker = dramatiq.Worker(world.app.broker, worker_threads=4, worker_timeout=100)
    worker.start()
    try:
        yield world
    finally:
        worker.stop()


@everywhere
def test_a_job_knows_which_message_it_is(running: World) -> None:
    """DESIGN 7: CurrentMessage."""
    message = running.app.current.send()
    assert message.get_result(backend=running.app.results, block=True, timeout=30_000) == [
        message.message_id,
        "current",
        "default",
    ]
    running.wait_idle()


@everywhere
def test_results_and_failures_are_stored(running: World) -> None:
    """DESIGN 7, B55: a result that is None is one too; a failure raises at who asks."""
    nothing, value, broken = (
        running.app.quick.send(None),
        running.app.quick.send([1, {"a": "ä\x00"}]),
        running.app.breaks.send("for whom it may concern"),
    )
    results = running.app.results
    assert nothing.get_result(backend=results, block=True, timeout=30_000) is None
    assert value.get_result(backend=results, block=True, timeout=30_000) == [1, {"a": "ä\x00"}]
    with pytest.raises(ResultFailure, match="for whom it may concern"):
        broken.get_result(backend=results, block=True, timeout=30_000)
    assert running.wait_state(broken.message_id, "failed").attempt == 1


@everywhere
def test_a_pipeline_runs_stage_by_stage_each_with_a_row(running: World) -> None:
    """B21, H45: stages are follow-ups of the outcome, with the ids that they were given."""
    app = running.app
    pipe = pipeline([app.add.message(1, 2), app.add.message(3), app.add.message(4)]).run()
    assert pipe.get_result(block=True, timeout=30_000) == 10
    ids = [message.message_id for message in pipe.messages]
    rows = [running.wait_state(id, "completed") for id in ids]
    assert [row.parent_id for row in rows] == [None, ids[0], ids[1]]
    assert [row.origin for row in rows] == ["sent", "follow_up", "follow_up"]
    assert [running.journal.count("begin", id) for id in ids] == [1, 1, 1]
    running.assert_kept()


@everywhere
def test_a_delayed_stage_waits(running: World) -> None:
    """A stage's delay is a row's due time like any other."""
    app = running.app
    second = app.add.message_with_options(args=(3,), delay=1_000)
    pipe = pipeline([app.add.message(1, 2), second]).run()
    row = running.wait_state_of_new(second.message_id, "completed")
    assert row.published_at is not None and row.published_at - row.created_at >= 1_000
    assert pipe.get_result(block=True, timeout=30_000) == 6


@everywhere
def test_a_group_gives_its_results(running: World) -> None:
    """Groups keep their stock behaviour: members are jobs like others."""
    app = running.app
    jobs = group([app.add.message(i, i) for i in range(5)]).run()
    assert list(jobs.get_results(block=True, timeout=30_000)) == [0, 2, 4, 6, 8]
    wait_until(lambda: running.counts() == {"completed": 5}, what="five rows")


@everywhere
def test_a_group_calls_back_when_all_are_done(running: World) -> None:
    """Group callbacks keep their stock behaviour in this release: called once when nothing goes wrong."""
    app = running.app
    jobs = group([app.quick.message(i) for i in range(4)])
    jobs.add_completion_callback(app.quick.message("all done"))
    jobs.run()
    wait_until(lambda: running.counts() == {"completed": 5}, 40, "four members and the callback")
    details = [event.detail for event in running.journal.events("end")]
    assert details.count("all done") == 1 and details[-1] == "all done"


@everywhere
def test_callbacks_run_once_with_what_they_are_told(running: World) -> None:
    """H45, B56: ``on_success`` and ``on_failure`` are follow-ups of the outcome."""
    app = running.app
    good = app.quick.send_with_options(args=("fine",), on_success=app.note_success)
    bad = app.breaks.send_with_options(args=("not fine",), on_failure=app.note_failure)
    for event, message in (("on_success", good), ("on_failure", bad)):
        wait_until(lambda e=event, m=message: running.journal.count(e, m.message_id), 40, f"{event} has run")
    assert running.journal.events("on_success", good.message_id)[0].detail == "fine"
    assert running.journal.events("on_failure", bad.message_id)[0].detail == {
        "type": "ValueError",
        "message": "not fine",
    }
    wait_until(lambda: running.counts() == {"completed": 3, "failed": 1}, 40, "all is done")
    running.wait_idle()
    assert running.journal.count("on_success") == running.journal.count("on_failure") == 1


@everywhere
def test_the_exhaustion_callback_runs_once(running: World) -> None:
    """B56: ``on_retry_exhausted`` fires when the last attempt has failed."""
    app = running.app
    message = app.flaky.send_with_options(args=(99,), on_retry_exhausted=app.note_exhausted.actor_name)
    running.wait_state(message.message_id, "failed")
    wait_until(lambda: running.journal.count("exhausted", message.message_id), 40, "it has run")
    wait_until(lambda: running.counts() == {"completed": 1, "failed": 1}, 40, "all is done")
    assert running.journal.count("exhausted") == 1


@everywhere
def test_a_coroutine_is_a_job_like_any_other(running: World) -> None:
    """DESIGN 7: AsyncIO; what it sends belongs to it, and has an id that a rerun would derive again."""
    app = running.app
    message = app.coroutine.send("async")
    assert message.get_result(backend=app.results, block=True, timeout=30_000) == "async"
    child = running.journal.events("end", message.message_id)[0].detail
    assert child == child_id(message.message_id, "quick", 0)
    row = running.wait_state(child, "completed")
    assert (row.parent_id, row.origin) == (message.message_id, "child")


def test_the_time_limit_interrupts_a_job_and_not_the_next_one(world: World) -> None:
    """H6, H7, B30: TimeLimit ends the attempt; the thread goes on.  (It works under the command only, B27.)"""
    app, running = world.app, world
    world.fleet.start()
    limited = [app.slow.send_with_options(args=(60,), time_limit=500, max_retries=0) for _ in range(6)]
    for message in limited:
        assert running.wait_state(message.message_id, "failed").attempt == 1
    after = [app.quick.send(i) for i in range(8)]
    for message in after:
        running.wait_state(message.message_id, "completed")
    assert all(running.journal.count("begin", message.message_id) == 1 for message in (*limited, *after))


@everywhere
def test_an_age_limit_fails_a_job_that_waited_too_long(running: World) -> None:
    """DESIGN 3 "deadline passed": a job that a middleware refuses is failed, and its actor not run."""
    app = running.app
    message = app.quick.message_with_options(args=("old",), max_age=1_000)
    old = message.copy(options={})
    object.__setattr__(old, "message_timestamp", message.message_timestamp - 60_000)
    app.broker.enqueue(old)
    row = running.wait_state(old.message_id, "failed")
    assert (row.reason, row.attempt) == ("expired", 0)
    assert running.journal.count("begin", old.message_id) == 0


@everywhere
def test_a_job_that_another_middleware_skips_is_cancelled(running: World) -> None:
    """H10: skipped before its start; no attempt, no run, nothing left in the broker."""
    message = running.app.quick.send_with_options(args=("skipped",), skip_me=True)
    row = running.wait_state(message.message_id, "cancelled")
    assert (row.reason, row.attempt) == ("skipped", 0)
    running.wait_idle()
    assert running.journal.count("begin", message.message_id) == 0


@everywhere
def test_several_queues_and_priorities_work(running: World) -> None:
    """DESIGN 7: rows know their canonical queue; each queue's jobs are run."""
    app = running.app
    messages = [app.elsewhere.send(i) for i in range(5)] + [app.elsewhere.send_with_options(args=(9,), delay=300)]
    for message in messages:
        assert running.wait_state(message.message_id, "completed").queue == "elsewhere"
        assert running.journal.count("begin", message.message_id) == 1


@only_sqlite
def test_prometheus_counts_each_job_once(world: World) -> None:
    """DESIGN 7: the Prometheus middleware, with its own process; retries and duplicates counted as stock does."""
    port, metrics_dir = free_port(), world.fleet.room / "metrics"
    world.fleet.start(DURABLE_TEST_PROMETHEUS="1", dramatiq_prom_port=str(port), dramatiq_prom_db=str(metrics_dir))
    done = [world.app.quick.send(i) for i in range(5)]
    retried = world.app.flaky.send(1)
    failed = world.app.breaks.send("counted")
    for message in (*done, retried):
        world.wait_state(message.message_id, "completed")
    world.wait_state(failed.message_id, "failed")
    world.deliver_again(done[0])
    world.wait_idle()

    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def total(name: str, actor: str) -> float:
        return sum(v for k, v in metrics().items() if k.startswith(f"{name}{{") and f'actor_name="{actor}"' in k)

    wait_until(lambda: total("dramatiq_messages_total", "quick") == 5, 20, "five are counted")
    assert total("dramatiq_messages_total", "flaky") == 2
    assert total("dramatiq_message_errors_total", "flaky") == 1
    assert total("dramatiq_message_errors_total", "breaks") == 1
    assert total("dramatiq_messages_inprogress", "quick") == 0


def durable_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("durable-")]


def test_jobs_of_a_process_that_only_sends_are_run_by_another(world: World) -> None:
    """DESIGN 7: no boot hook has run here, and no thread; pipelines and delays included."""
    assert durable_threads() == []
    app = world.app
    pipe = pipeline([app.add.message(1, 2), app.add.message_with_options(args=(3,), delay=200)]).run()
    later = app.quick.send_with_options(args=("later",), delay=200)
    world.fleet.start()
    assert pipe.get_result(block=True, timeout=30_000) == 6
    world.wait_state(later.message_id, "completed")


def test_a_plain_worker_can_be_stopped_and_started_again(world: World) -> None:
    """B27: the engine goes with the worker, in one process, again and again."""
    for turn in range(3):
        worker = dramatiq.Worker(world.app.broker, worker_threads=2, worker_timeout=100)
        worker.start()
        try:
            message = world.app.quick.send(turn)
            world.wait_state(message.message_id, "completed")
        finally:
            worker.stop()
    assert world.counts() == {"completed": 3}
    wait_until(lambda: durable_threads() == [], what="no thread of ours is left")
