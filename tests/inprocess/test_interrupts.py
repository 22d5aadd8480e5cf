"""Interrupts that land on the hooks instead of on the actor (H6, H7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Interrupt, Middleware, Shutdown, TimeLimitExceeded

from dramatiq_durable.store import reading
from tests.inprocess.conftest import Bench


class Breaks(Middleware):
    """Raises interrupts from its after-hook, as an asynchronous exception does that lands there.

    Parameters:
      *interrupts: One for each time that the hook runs.
    """

    def __init__(self, *interrupts: type[Interrupt]) -> None:
        self.interrupts = list(interrupts)

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        if self.interrupts:
            raise self.interrupts.pop(0)("landed in a hook")


# An interrupt in a hook of a failed run, or a second one, ends Dramatiq's worker thread: that is what these are about.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.mark.parametrize("interrupts", [(TimeLimitExceeded,), (Shutdown,), (TimeLimitExceeded, Shutdown)])
def test_an_interrupt_in_an_after_hook_does_not_retry_a_finished_job(
    bench: Callable[..., Bench], interrupts: tuple[type[Interrupt], ...]
) -> None:
    """H6, H7, P4: the actor has returned; its result and its next stage are not lost, and it does not run again."""
    # Given a job with a result and a next stage, and an interrupt that lands in a hook after it
    b = bench(Breaks(*interrupts))
    runs: list[str] = []

    @dramatiq.actor(broker=b.broker, store_results=True)
    def first() -> int:
        runs.append("first")
        return 20

    @dramatiq.actor(broker=b.broker, store_results=True)
    def second(value: int) -> int:
        runs.append("second")
        return value + 1

    pipe = first.message() | second.message()
    pipe.run()
    # When it runs
    b.work()
    assert pipe.get_result(block=True, timeout=20_000) == 21
    b.join()
    # Then both are completed, once, with nothing charged
    assert runs == ["first", "second"]
    row = b.job(pipe.messages[0])
    assert (row.state, row.attempt, row.retries, row.interruptions) == ("completed", 1, 0, 0)
    assert b.broker.dead_letters == []


def test_an_interrupt_in_an_after_hook_of_a_failed_job_does_not_cost_a_second_attempt(
    bench: Callable[..., Bench],
) -> None:
    """H7: the failure is counted once, and the retry is kept."""
    b = bench(Breaks(TimeLimitExceeded))
    runs: list[int] = []

    @dramatiq.actor(broker=b.broker, max_retries=1, min_backoff=10, max_backoff=20)
    def fails_once() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("once")

    message = fails_once.send()
    b.work(threads=3)
    b.join()
    row = b.job(message)
    assert (row.state, row.attempt, row.retries) == ("completed", 2, 1)
    assert [a.error_type for a in reading.attempts(b.db, message.message_id)] == ["ValueError"]


def test_the_current_message_is_forgotten_after_a_skip(bench: Callable[..., Bench]) -> None:
    """H11: a thread does not go on showing a message that was skipped."""
    seen: list[Any] = []

    class Skips(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if message.actor_name == "skipped":
                raise dramatiq.middleware.SkipMessage("not today")

        def after_ack(self, broker: Any, message: Any) -> None:
            if message.actor_name == "skipped":
                seen.append(dramatiq.middleware.CurrentMessage.get_current_message())

    b = bench(Skips())

    @dramatiq.actor(broker=b.broker)
    def skipped() -> None:
        raise AssertionError("must not run")

    message = skipped.send()
    b.work(threads=1)
    b.join()
    row = b.job(message)
    assert (row.state, row.reason, row.attempt) == ("cancelled", "skipped", 0)
    assert seen == [None]
