"""Ends of a run that are neither a return nor a plain error (H8, H9, H10)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage
from dramatiq.results import ResultFailure, ResultMissing

from dramatiq_durable.runtime.current import RUN
from dramatiq_durable.store import jobs, reading
from tests.inprocess.conftest import Bench


def test_an_actor_that_skips_itself_ends_and_leaves_its_thread(bench: Callable[..., Bench]) -> None:
    """An actor may raise SkipMessage; Dramatiq then acknowledges.  It had started, and it does not run again."""
    seen: list[Any] = []

    class Looks(Middleware):
        def after_ack(self, broker: Any, message: Any) -> None:
            seen.append(RUN.get())

    b = bench(Looks())
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker, on_lost="fail", max_retries=0)
    def skips() -> None:
        # A strict start (on_lost): the row says that it has begun.
        runs.append(1)
        raise SkipMessage("nothing to do")

    message = skips.send()
    b.work(threads=1)
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, runs) == ("completed", 1, [1])
    assert seen == [None]
    assert b.engine.counters.refused == 0


def test_a_job_that_is_too_old_tells_those_who_wait_for_its_result(bench: Callable[..., Bench]) -> None:
    """AgeLimit fails the message, and Results stores that, as without us."""
    b = bench()

    @dramatiq.actor(broker=b.broker, store_results=True, max_age=1)
    def late() -> int:
        raise AssertionError("must not run")

    message = late.send()
    time.sleep(0.01)
    b.work()
    b.join()
    row = b.job(message)
    assert (row.state, row.reason, row.attempt) == ("failed", "expired", 0)
    with pytest.raises(ResultFailure, match="age limit"):
        message.get_result(backend=b.backend, block=True, timeout=5_000)


def test_a_message_that_a_middleware_fails_beforehand_has_not_started(bench: Callable[..., Bench]) -> None:
    """H8: ``message.fail()`` without raising: the actor does not run, and that is no attempt."""

    class Refuses(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            message.fail()

    b = bench(Refuses())

    @dramatiq.actor(broker=b.broker)
    def refused() -> None:
        raise AssertionError("must not run")

    message = refused.send()
    b.work()
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, row.started_at) == ("failed", 0, None)


def test_a_stage_that_cannot_be_sent_fails_the_run_and_its_result(bench: Callable[..., Bench]) -> None:
    """H45: what an after-hook fails to send is not lost without a word, and nobody is told of a success."""

    class Vetoes(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int) -> None:
            if message.actor_name == "second":
                raise MiddlewareError("not to this one")

    b = bench(Vetoes())

    @dramatiq.actor(broker=b.broker, store_results=True, max_retries=0)
    def first() -> int:
        return 1

    @dramatiq.actor(broker=b.broker)
    def second(value: int) -> None:
        raise AssertionError("must not run")

    pipe = first.message() | second.message()
    pipe.run()
    b.work()
    b.join()
    row = b.job(pipe.messages[0])
    assert (row.state, row.reason) == ("failed", "follow_up_refused")
    assert reading.get_job(b.db, pipe.messages[1].message_id) is None
    with pytest.raises(ResultFailure, match="not to this one"):
        pipe.messages[0].get_result(backend=b.backend, block=True, timeout=5_000)


def test_a_retry_survives_an_option_that_cannot_be_encoded(bench: Callable[..., Bench]) -> None:
    """A middleware that keeps an object in the options of a message costs nobody their retry."""

    class Keeps(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            message.options["span"] = object()
            message.options["seen"] = message.options.get("seen", 0) + 1

    b = bench(Keeps())
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker, max_retries=1, min_backoff=10, max_backoff=20)
    def fails_once() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("once")

    message = fails_once.send()
    b.work()
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, row.retries) == ("completed", 2, 1)
    stored = jobs.load(b.db, [message.message_id])[message.message_id]
    assert b'"seen"' in bytes(stored.options or b"")
    assert b"span" not in bytes(stored.options or b"")


def test_a_lost_run_stores_no_result(bench: Callable[..., Bench]) -> None:
    """P4: a run whose job was taken over tells nobody anything."""
    b = bench()

    @dramatiq.actor(broker=b.broker, store_results=True)
    def taken() -> int:
        run = RUN.get()
        assert run is not None
        run.lost = True
        return 1

    message = taken.send()
    worker = b.work()
    deadline = time.monotonic() + 10
    while message.message_id in b.engine.registry or not b.broker.queues["default"].empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker is not None
    with pytest.raises(ResultMissing):
        message.get_result(backend=b.backend)


def test_a_large_result_does_not_fail_the_finished_job(bench: Callable[..., Bench]) -> None:
    """The limit is for what is sent.  Work that is done, and paid for, is not thrown away for the size of its result,
    nor for a callback that carries the whole message.
    """
    b = bench(max_payload=2_000)
    seen: list[tuple[str, int]] = []

    @dramatiq.actor(broker=b.broker, max_retries=0)
    def first(text: str) -> str:
        return "x" * 5_000

    @dramatiq.actor(broker=b.broker, max_retries=0)
    def second(text: str) -> None:
        seen.append(("second", len(text)))

    @dramatiq.actor(broker=b.broker, max_retries=0)
    def told(message: Any, result: Any) -> None:
        seen.append(("told", len(message["args"][0])))

    pipe = first.message_with_options(args=("y" * 1_000,), on_success="told") | second.message()
    pipe.run()
    b.work()
    b.join()
    assert sorted(seen) == [("second", 5_000), ("told", 1_000)]
    assert b.job(pipe.messages[0]).state == "completed"
