"""The crash matrix: at every point a worker dies, is frozen past its lease, or is refused, and everything comes right.

Not part of the ordinary test run for its length; the check of the project runs it.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from dramatiq_durable import crashpoints
from dramatiq_durable.store import jobs, outcomes, reading, recovery
from dramatiq_durable.store.dialects import Statement
from tests.acceptance.conftest import World
from tests.harness.workers import WorkerProcess
from tests.servers import wait_until

#: Reached when a worker is told to stop.
AT_STOP = {"release", "requeue"}
#: Reached when the broker does not take a due job; when an actor was unknown to another worker.
ELSEWHERE = {"unpublish", "unpark"}
REACHED = [point for point in crashpoints.POINTS if point not in AT_STOP | ELSEWHERE]

#: What the watched statements of the store do to a job, and the point that stands for each.
STATEMENTS = {
    "_RECORD": "record",
    "_RECORD_UNDER": "record",
    "_CLAIM": "claim",
    "_START": "start",
    "_RENEW": "renew",
    "_RELEASE": "release",
    "_COMPLETE": "settle",
    "_FAIL": "settle",
    "_FAIL_UNSTARTED": "settle",
    "_CANCEL_UNSTARTED": "settle",
    "_RETRY": "settle",
    "_INTERRUPT": "settle",
    "_GIVE_BACK": "settle",
    "_PARK": "settle",
    "_TAKE_DUE": "take_due",
    "_REAP_CLAIMED": "reap",
    "_REAP_STARTED": "reap",
    "_UNPARK": "unpark",
}


def test_every_statement_that_moves_a_job_belongs_to_a_point() -> None:
    """A transition without a crash point fails here."""
    for module in (jobs, outcomes, recovery):
        for name, statement in vars(module).items():
            if isinstance(statement, Statement):
                text = " ".join(statement.texts["sqlite"].split())
                moves = "SET state =" in text or "INSERT INTO durable_jobs" in text or "started_at =" in text
                assert not moves or STATEMENTS.get(name) in crashpoints.POINTS, f"{module.__name__}.{name} has no point"


def _send(world: World) -> dict[str, Any]:
    """Send one of everything; return the messages by what is expected of them."""
    app = world.app
    world.fleet.touch("go")
    chain = app.quick.message("first") | app.quick.message()
    chain.run()
    sent: dict[str, Any] = {
        "plain": [app.quick.send(i) for i in range(3)],
        "stages": chain.messages,
        "flaky": [app.flaky.send(1)],
        "delayed": [app.quick.send_with_options(args=("late",), delay=400)],
        "parent": [app.parent.send(2, "go")],
        "called_back": [app.quick.send_with_options(args=("ok",), on_success=app.note_success.actor_name)],
        "fails": [app.breaks.send()],
        "careful": [app.careful.send("go")],
    }
    return sent


@pytest.fixture(autouse=True)
def _prompt_maintenance(request: pytest.FixtureRequest) -> None:
    """Copies that a dead worker had fetched come back in seconds instead of a minute."""
    if "world" in request.fixturenames:
        request.getfixturevalue("world").fleet.env["DURABLE_TEST_HEARTBEAT_TIMEOUT"] = "3000"


def _lose(world: World) -> Any:
    """Leave a run behind whose worker was killed, and a broker that has forgotten everything."""
    first = world.fleet.start(threads=1)
    lost = world.app.held.send("go")
    world.wait_begun(lost.message_id)
    # Long enough for the heartbeat to note the start: the reaper then finds a started run.
    wait_until(lambda: world.job(lost.message_id).started_at is not None, what="the start is noted")
    world.fleet.kill(first)
    return lost


def _crash(world: World, when: str, point: str, action: str) -> tuple[WorkerProcess, dict[str, Any], Any]:
    """Bring a worker to the point; return it when it has got there."""
    lost = _lose(world)
    sent = _send(world)
    world.valkey.flush()
    # Two that come from outside: a message of an unequipped process, and bytes that nobody can read.
    sent["adopted"] = [world.app.quick.message("foreign")]
    world.plain_broker().enqueue(sent["adopted"][0])
    world.deliver(b"\x00 no message")
    worker = world.fleet.start(ready=False, DURABLE_TEST_CRASH=f"{when} {point} {action}")
    wait_until(lambda: world.journal.count("crash"), 60, f"the worker gets to the point {when} {point}")
    crash = world.journal.events("crash")[0]
    if action == "kill":
        world.fleet.deaths[crash.pid] = crash.at
        wait_until(worker.dead, 30, "the killed worker is gone")
    return worker, sent, lost


def _settled(world: World) -> bool:
    return not set(reading.counts(world.db)) & {"scheduled", "queued", "active"}


def _check(world: World, sent: dict[str, Any], lost: Any, *, frozen: bool = False) -> None:
    """Everything has come right, by the rows and by what the jobs themselves say."""
    wait_until(lambda: _settled(world), 60, "every job is final or held")
    # What was fetched by a worker that died before it had a row comes back when that worker counts as offline.
    world.wait_idle()
    wait_until(lambda: _settled(world), 60, "every job is final or held")
    for kind, messages in sent.items():
        for message in messages:
            row = world.job(message.message_id)
            expected = {"fails": {"failed"}, "careful": {"completed", "in_doubt"}}.get(kind, {"completed"})
            assert row.state in expected, (kind, row)
    assert world.job(lost.message_id).state == "completed"
    # A pipeline's stage and a callback are sent once for each completed run, and children once for each parent.
    counts = reading.counts(world.db)
    assert sum(counts.values()) == 1 + 3 + 2 + 1 + 1 + 1 + 2 + 2 + 1 + 1 + 1 + ("marker" in sent), counts
    called_back = sent["called_back"][0].message_id
    assert {e.detail for e in world.journal.events("on_success", called_back)} == {"ok"}
    if not frozen:
        assert world.journal.concurrent(world.fleet.deaths) == []
    _check_final(world)
    assert len(world.undecodable()) == 1


def _check_final(world: World) -> None:
    """P4: no job begins after its completion was committed."""
    offset = time.time() - time.monotonic()
    for event in world.journal.events("begin"):
        row = world.job(event.job)
        if row.state == "completed" and row.finished_at is not None:
            assert (event.at + offset) * 1000 < row.finished_at + 20, (event, row)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", REACHED)
def test_a_worker_that_is_killed_at_a_point_costs_nothing(world: World, point: str, when: str) -> None:
    """P2, P3, P4, P5 of the crash matrix: SIGKILL right before and right after every write and every word."""
    _, sent, lost = _crash(world, when, point, "kill")
    world.fleet.start()
    _check(world, sent, lost)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", REACHED)
def test_a_refusal_at_a_point_costs_nothing(world: World, point: str, when: str) -> None:
    """P10: the database or the broker refuses once, before the call or after it is done (its answer is lost)."""
    _, sent, lost = _crash(world, when, point, "refuse")
    _check(world, sent, lost)


# On SQLite a process that is frozen inside a transaction keeps everybody out of the file until it wakes: nobody can
# help that.
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", ["claim", "start", "settle", "renew", "take_due", "publish", "store_result", "ack"])
def test_a_worker_that_is_frozen_at_a_point_and_wakes_later_changes_nothing(
    world: World, point: str, when: str
) -> None:
    """P3: frozen past its lease; another takes over; when it wakes, its writes find nothing to change."""
    worker, sent, lost = _crash(world, when, point, "freeze")
    world.fleet.start()
    wait_until(lambda: _settled(world), 60, "every job is final or held")
    # What a frozen process has fetched comes back as a dead one's does, when it counts as offline.
    wait_until(lambda: reading.get_job(world.db, sent["adopted"][0].message_id), 60, "the foreign job has a row")
    wait_until(lambda: _settled(world), 60, "every job is final or held")
    before = {row.id: row for row in reading.list_jobs(world.db, limit=1000)}
    worker.thaw()
    marker = world.app.quick.send("after")
    world.wait_state(marker.message_id, "completed")
    time.sleep(1.5)
    after = {row.id: row for row in reading.list_jobs(world.db, limit=1000) if row.id != marker.message_id}
    assert after == before
    sent["marker"] = [marker]
    _check(world, sent, lost, frozen=True)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", sorted(AT_STOP))
def test_a_stopping_worker_that_is_killed_at_a_point_costs_nothing(world: World, point: str, when: str) -> None:
    """Crash matrix "worker stopped": killed while it gives its claims back."""
    world.fleet.touch("gate")
    worker = world.fleet.start(threads=2, DURABLE_TEST_CRASH=f"{when} {point} kill")
    waiting = [world.app.quick.send(i) for i in range(4)]
    wait_until(lambda: world.journal.count("gated"), what="one job is at the gate")
    wait_until(lambda: {world.state(m.message_id) for m in waiting} == {"active"}, what="all are claimed")
    worker.process.send_signal(signal.SIGTERM)
    world.wait_said(worker, "Shutting down...")
    world.fleet.remove("gate")
    wait_until(lambda: world.journal.count("crash"), 40, f"the worker gets to the point {when} {point}")
    crash = world.journal.events("crash")[0]
    world.fleet.deaths[crash.pid] = crash.at
    world.fleet.start()
    for message in waiting:
        assert world.wait_state(message.message_id, "completed").attempt == 1
    world.assert_kept()
    _check_final(world)
