"""Every way in which applications run processes: the command and its options, plain workers, senders, forks."""

from __future__ import annotations

import time

import pytest

import dramatiq_durable as durable
from dramatiq_durable.middleware.capture import CaptureOutcome
from dramatiq_durable.store import reading
from tests.acceptance.conftest import World, only_sqlite
from tests.servers import wait_until

APP, MORE = "tests.harness.app", "tests.harness.more"


def wait_all_completed(world: World, count: int) -> None:
    wait_until(lambda: world.counts() == {"completed": count}, 40, f"{count} jobs are completed: {world.counts()}")


@pytest.mark.parametrize("options", [[], ["--use-spawn"]], ids=["fork", "spawn"])
def test_several_processes_share_the_work_and_nothing_runs_twice(world: World, options: list[str]) -> None:
    """The command with ``-p 2``, forked and spawned."""
    # Given a command with two worker processes, and jobs of all kinds
    worker = world.fleet.start(threads=2, processes=2, how={"options": options})
    # NOTE: A process with two threads takes four messages at a time: eight are more than one takes.
    held = [world.app.held.send("go") for _ in range(8)]
    wait_until(lambda: len(world.journal.events("begin")) == 4, what="four are running")
    jobs = [world.app.quick.send(i) for i in range(20)] + [world.app.quick.send_with_options(args=(1,), delay=300)]
    flaky = world.app.flaky.send(1)
    # When they have run
    world.fleet.touch("go")
    wait_all_completed(world, len(held) + len(jobs) + 1)
    # Then each ran once, in both processes, which are two owners
    assert all(world.journal.count("begin", job.message_id) == 1 for job in [*held, *jobs])
    assert world.journal.count("begin", flaky.message_id) == 2
    assert len({event.pid for event in world.journal.events("begin")}) == 2
    owners = {world.job(job.message_id).owner for job in held}
    assert len(owners) == 2
    # And they stop in an orderly way
    worker.terminate()
    assert worker.wait(30) == 0
    world.assert_kept()


@only_sqlite
def test_a_worker_of_some_queues_still_publishes_the_delayed_jobs_of_all(world: World) -> None:
    """``--queues``: nobody works on the other queue yet, but its jobs are in the broker when they are due."""
    # Given a worker of one queue
    world.fleet.start(how={"options": ["--queues", "default"]})
    delayed = world.app.elsewhere.send_with_options(args=(1,), delay=300)
    mine = world.app.quick.send_with_options(args=(2,), delay=300)
    # When the jobs are due
    world.wait_state(mine.message_id, "completed")
    # Then the other queue's is queued and in the broker, and waits there
    row = world.wait_state(delayed.message_id, "queued")
    wait_until(lambda: world.in_broker(world.job(delayed.message_id).broker_ref or "", "elsewhere"), what="published")
    assert row.publishes == 1
    # And a worker of that queue runs it, once
    world.fleet.start(how={"options": ["--queues", "elsewhere"]})
    world.wait_state(delayed.message_id, "completed")
    assert world.journal.count("begin", delayed.message_id) == 1


@only_sqlite
def test_nothing_is_put_right_before_all_modules_are_imported(world: World) -> None:
    """H58: a process that knows half of its actors neither parks nor adopts, unparks nor publishes anything."""
    # Given a job that was parked by a release that does not know its actor, and one whose message was lost
    first = world.fleet.start()
    message = world.app.dramatiq.Message(queue_name="default", actor_name="extra", args=(1,), kwargs={}, options={})
    world.app.broker.enqueue(message)
    world.wait_state(message.message_id, "parked")
    first.terminate()
    first.wait(30)
    # When a release boots that knows it, from a second module that takes long to import
    known = {worker.owner for worker in reading.workers(world.db, 600_000)}
    second = world.fleet.start(ready=False, how={"modules": [APP, MORE]}, DURABLE_TEST_SLOW_IMPORT="2")
    wait_until(lambda: world.journal.count("importing"), 30, "it imports")
    # Then it does nothing until it has imported everything
    while not world.journal.count("imported"):
        assert world.state(message.message_id) == "parked"
        assert {worker.owner for worker in reading.workers(world.db, 600_000)} == known
        time.sleep(0.1)
    # And then it unparks the job and runs it
    world.wait_state(message.message_id, "completed")
    assert world.journal.count("begin", message.message_id) == 1
    assert "nknown" not in second.text()


def test_jobs_of_an_extra_module_and_its_queue_run(world: World) -> None:
    """Extra modules: their queues are consumed, their delayed jobs published."""
    world.fleet.start(how={"modules": [APP, MORE]})
    message = world.app.dramatiq.Message(queue_name="more", actor_name="extra", args=(1,), kwargs={}, options={})
    world.app.broker.declare_queue("more")
    world.app.broker.enqueue(message)
    later = message.copy(message_id=world.app.dramatiq.message.generate_unique_id())
    world.app.broker.enqueue(later, delay=300)
    wait_all_completed(world, 2)


def test_a_plain_worker_does_all_that_the_command_does(world: World) -> None:
    """``Worker(broker)``: there is no ``after_process_boot`` and no signal handler (B27, H58)."""
    # Given a job whose worker was killed, and a plain worker
    first = world.fleet.start()
    lost = world.app.held.send("go")
    world.wait_begun(lost.message_id)
    world.fleet.kill(first)
    worker = world.fleet.run("plain", "stop")
    # When it is sent jobs, retries, delays and results
    delayed = world.app.quick.send_with_options(args=(1,), delay=300)
    flaky = world.app.flaky.send(1)
    sum_ = world.app.add.send(1, 2)
    world.fleet.touch("go")
    assert sum_.get_result(backend=world.app.results, block=True, timeout=30_000) == 3
    for job in (delayed, flaky, lost):
        world.wait_state(job.message_id, "completed")
    # And stopped while it runs one
    held = world.app.held.send("go on")
    world.wait_begun(held.message_id)
    world.fleet.touch("stop")
    world.fleet.touch("go on")
    assert worker.wait(30) == 0, worker.text()
    # Then nothing was lost, and none of its threads is left
    assert world.state(held.message_id) == "completed"
    (stopped,) = world.journal.events("stopped")
    assert stopped.detail == []
    world.assert_kept()


def test_a_process_that_only_sends_has_no_threads_and_loses_nothing(world: World) -> None:
    """Senders: rows and messages; what is due later is left to workers."""
    sender = world.fleet.run("send_only", "5")
    assert sender.wait(30) == 0, sender.text()
    assert world.journal.events("sent")[0].detail == []
    assert world.counts() == {"queued": 5, "scheduled": 1}
    world.fleet.start()
    wait_all_completed(world, 6)
    world.assert_kept()


def test_a_preloaded_server_and_its_forked_children_send_at_the_same_time(world: World) -> None:
    """B45, H36: no connection is shared over the fork, and every child is someone else."""
    # Given a server that has used broker and record, and forks; when all of them send
    children, each = 4, 25
    server = world.fleet.run("preloaded", str(children), str(each))
    assert server.wait(60) == 0, server.text()
    # Then every job is there, and runs once
    assert world.counts() == {"queued": 1 + (children + 1) * each}
    identities = world.journal.events("identity")
    assert len({event.job for event in identities}) == children + 1
    assert len({event.detail for event in identities}) == children + 1
    world.fleet.start()
    wait_all_completed(world, 1 + (children + 1) * each)
    assert len(world.journal.events("begin")) == 1 + (children + 1) * each
    assert world.journal.events("raised") == []


@pytest.mark.parametrize("running", ["no", "yes"], ids=["stopped", "running"])
def test_a_worker_in_a_forked_child_works_after_its_parent_had_one(world: World, running: str) -> None:
    """A fork of a process that has, or had, a worker: the child's is a new owner with threads of its own."""
    # Given a process whose worker has run a job
    parent = world.fleet.run("forked_worker", running)
    before = world.app.quick.send("before")
    world.wait_state(before.message_id, "completed")
    # When it forks a child that starts a worker
    world.fleet.touch("fork")
    wait_until(lambda: len(world.journal.events("working")) == 1, 30, parent.text())
    if running == "yes":
        world.fleet.touch("parent stop")
    held = world.app.held.send("go")
    world.wait_begun(held.message_id)
    wait_until(
        lambda: len(world.journal.events("identity")) == 2 and len(world.journal.events("forked")) == 1,
        what="both said who they are",
    )
    jobs = [world.app.quick.send_with_options(args=(i,), delay=200) for i in range(5)]
    for job in jobs:
        world.wait_state(job.message_id, "completed")
    # Then the child is somebody else, with one thread of each kind
    parent_is, child_is = world.journal.events("identity")
    assert (parent_is.job, parent_is.detail) != (child_is.job, child_is.detail)
    assert parent_is.job != child_is.job and parent_is.detail != child_is.detail
    (working,) = world.journal.events("working")
    assert len(working.detail) == len(set(working.detail)) >= 4
    # And both stop, with nothing lost
    world.fleet.touch("go")
    world.wait_state(held.message_id, "completed")
    world.fleet.touch("child stop")
    assert parent.wait(30) == 0, parent.text()
    assert [event.detail for event in world.journal.events("stopped")] == [[], []]
    assert world.journal.events("raised") == []
    world.assert_kept()


@only_sqlite
def test_a_child_that_an_actor_forks_sends_as_itself(world: World) -> None:
    """Inside a job a fork is a process of its own: it cannot write under its parent's claim."""
    world.fleet.start()
    job = world.app.forks.send()
    world.wait_state(job.message_id, "completed")
    (sent,) = world.journal.events("sent by child")
    row = world.wait_state(sent.job, "completed")
    assert row.parent_id is None
    assert world.counts() == {"completed": 2}


def test_nothing_depends_on_a_fork_of_the_command() -> None:
    """H59: Dramatiq starts the forks of middlewares once, perhaps not at all, and watches none of them."""
    pieces = [durable.DurableRecord(), durable.Reconciler(), CaptureOutcome()]
    assert [piece.forks for piece in pieces] == [[], [], []]
