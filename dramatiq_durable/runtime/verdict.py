"""How a run ended: from what Dramatiq's hooks saw to the one outcome that is written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import Interrupt, Shutdown

from .. import redact
from ..store.types import Evidence, Outcome
from . import messages
from .capture import results_of

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy

    from .capture import Capture
    from .held import Run

__all__ = ["decide", "decide_skipped", "evidence_of"]


def evidence_of(exception: BaseException) -> Evidence:
    """Return what is kept of *exception*: redacted and bounded."""
    return Evidence(*redact.describe(exception))


def decide(
    broker: Broker, run: Run, message: MessageProxy, exception: BaseException | None, capture: Capture
) -> Outcome | None:
    """Decide how *run* ended.

    The order matters.  A run that lost its claim has no outcome.  A follow-up that cannot be sent fails the run, since
    it would be lost without a word.  An interruption by a shutdown is nobody's failure.  A message that a middleware
    failed on purpose is failed, whatever else was captured.

    Returns:
      Outcome: The outcome, or ``None`` for a run whose job is someone else's.
    """
    if run.lost:
        return None
    if capture.errors:
        message.stuff_exception(capture.errors[0])
        return _failed(broker, run, message, capture.errors[0], capture, reason="follow_up_refused")
    interrupt = _resisted(exception) or exception
    if isinstance(interrupt, Shutdown) or isinstance(interrupt, Interrupt) and not run.started:
        # An interrupt before the actor began (a time limit, while others were waited for) is nobody's failure either.
        message.failed = False
        reason = "shutdown" if isinstance(interrupt, Shutdown) else "not_started"
        # What other hooks made of the interruption (a retry, a callback) is dropped: the job simply runs again.
        return Outcome(
            run.id,
            run.claim,
            "interrupted",
            ran_for=run.ran_for(),
            delay=_pause_after(run, exception),
            reason=reason,
            evidence=evidence_of(interrupt),
        )
    if exception is None and not message.failed:
        if run.again is not None:
            return _again(run, message, run.again, None, capture)
        return _ended(run, "completed", capture)
    if capture.own is not None and not message.failed:
        return _again(run, message, capture.own, exception, capture)
    return _failed(broker, run, message, exception, capture)


def _resisted(exception: BaseException | None) -> BaseException | None:
    """Return the interrupt that a coroutine resisted, if *exception* says so.

    ``AsyncIO`` waits for a second after it has cancelled a coroutine; then it raises this error and leaves it running.
    """
    cause = exception.__cause__ if isinstance(exception, RuntimeError) else None
    return cause if isinstance(cause, Interrupt) else None


def _pause_after(run: Run, exception: BaseException | None) -> int:
    """Return for how long a job must not start again (milliseconds): the rest of its lease, as after a dead worker, if
    its coroutine still runs.
    """
    if _resisted(exception) is None:
        return 0
    return max(0, int((run.valid_until - time.monotonic()) * 1000))


def decide_skipped(broker: Broker, run: Run, message: MessageProxy, capture: Capture) -> Outcome | None:
    """Decide about a claimed job that another middleware refused to start, or whose actor skipped itself."""
    if run.lost or run.outcome is not None:
        return run.outcome
    if message.failed:
        reason = "error" if run.started else "expired"
        return _failed(broker, run, message, message._exception, capture, reason=reason)
    if run.started:
        # The actor itself raised SkipMessage: it has begun and it is done, which Dramatiq acknowledges.
        return _ended(run, "completed", capture)
    return Outcome(run.id, run.claim, "skipped", started=False, reason="skipped", results=tuple(capture.results))


def _ended(
    run: Run, kind: str, capture: Capture, *, reason: str | None = None, evidence: Evidence | None = None
) -> Outcome:
    return Outcome(
        run.id,
        run.claim,
        kind,
        started=run.started,
        ran_for=run.ran_for(),
        reason=reason,
        evidence=evidence,
        follow_ups=tuple(capture.follow_ups),
        results=tuple(capture.results),
    )


def _failed(
    broker: Broker,
    run: Run,
    message: MessageProxy,
    exception: BaseException | None,
    capture: Capture,
    *,
    reason: str | None = None,
) -> Outcome:
    message.fail()
    # NOTE: Results stores a failure only after the nack, when the outcome is out of our hands.  So it is asked now,
    # while what it stores is still captured, and its own write later is not let through.
    for results in results_of(broker):
        results.after_nack(broker, message)
    evidence = None if exception is None else evidence_of(exception)
    reason = reason or ("failed" if exception is None else "error")
    return _ended(run, "failed", capture, reason=reason, evidence=evidence)


def _again(
    run: Run, message: MessageProxy, own: tuple[Any, int], exception: BaseException | None, capture: Capture
) -> Outcome:
    """The run's own message was enqueued again: by the retry policy, or by the actor itself ("run me later").

    The input of the next run is the row's, as it was sent, also when the actor changed its arguments in place; only a
    message with other arguments replaces it.  It stays in its queue.
    """
    sent, delay = own
    options = sent.options
    if exception is None:
        options = {**options, messages.ROUND: messages.round_of(message) + 1}
    changed = sent.args is not message.args or sent.kwargs is not message.kwargs
    return Outcome(
        run.id,
        run.claim,
        "retry",
        started=run.started,
        ran_for=run.ran_for(),
        delay=max(delay, _pause_after(run, exception)),
        options=messages.encode_options(options),
        payload=messages.encode(sent.copy(queue_name=message.queue_name), None) if changed else None,
        counted=exception is not None,
        reason="retry" if exception is not None else "again",
        evidence=None if exception is None else evidence_of(exception),
        follow_ups=tuple(capture.follow_ups),
        results=tuple(capture.results) if exception is None else (),
    )
