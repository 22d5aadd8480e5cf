"""The states of a job, and who may move it: the only table of its kind.

Code asks this module, the documentation draws its diagram from it, the database repeats it as CHECK constraints, and
the tests compare all three.  Nothing else in the package lists states.

A job that is *active* is in one of two phases: *claimed* (a worker holds it and has not begun) or *started* (its actor
may have run).  The phase is not a state of its own: it is whether ``started_at`` is set.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = ["FINAL", "HELD", "LEGAL", "OPEN", "TRANSITIONS", "JobState", "Phase", "Transition"]


class JobState(StrEnum):
    """Where a job stands.  The values are what the database stores and what people see."""

    #: Its due time lies ahead; the scheduler hands it to the broker then.
    SCHEDULED = "scheduled"
    #: Ready to run: a message is in the broker, or about to be.
    QUEUED = "queued"
    #: A worker process holds it under a lease.
    ACTIVE = "active"
    #: An effect may have happened and nobody knows: waits for a person, or for the effect's own ``reconcile``.
    IN_DOUBT = "in_doubt"
    #: Not admitted (no cap, cap reached, policy): waits for a person.
    DENIED = "denied"
    #: Nobody here can run it (unknown actor, payload from the future): waits for a release that can.
    PARKED = "parked"
    #: Its outcome is committed.
    COMPLETED = "completed"
    #: It will not be tried again by itself; its evidence is kept.
    FAILED = "failed"
    #: Somebody said that it shall not run.
    CANCELLED = "cancelled"


class Phase(StrEnum):
    """The two phases of an active job."""

    CLAIMED = "claimed"
    STARTED = "started"


#: States that a worker never leaves: a message of such a job is acknowledged and does nothing.
FINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})

#: States that wait for a person, or for what the job lacks.
HELD = frozenset({JobState.IN_DOUBT, JobState.DENIED, JobState.PARKED})

#: States in which a job is neither finished nor held.
OPEN = frozenset({JobState.SCHEDULED, JobState.QUEUED, JobState.ACTIVE})


class Transition(NamedTuple):
    """One row of the table.

    Parameters:
      source(str): A state, or a phase of an active job, or ``"new"``.
      target(str): Likewise.
      who(str): Who moves the job.
      why(str): When, and what becomes of its counters.
    """

    source: str
    target: str
    who: str
    why: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition("new", "queued", "producer", "before the broker sees anything"),
    Transition("new", "scheduled", "producer", "a delay lies ahead"),
    Transition("new", "parked", "worker", "a message that carries our mark has no row: never run"),
    Transition("scheduled", "queued", "scheduler", "it is due"),
    Transition("queued", "claimed", "worker", "fetched; the claim grows by one"),
    Transition("claimed", "started", "owner", "right before the actor; the attempt grows by one"),
    Transition("claimed", "queued", "owner or reconciler", "stopped, or its lease ran out: nothing is charged"),
    Transition("claimed", "scheduled", "owner", "over a limit, or policy says later: not counted"),
    Transition("claimed", "denied", "owner", "no cap, no price, cap reached, or policy says no"),
    Transition("claimed", "failed", "owner", "its deadline passed"),
    Transition("claimed", "cancelled", "owner", "cancel was requested, or another middleware skipped it"),
    Transition("started", "completed", "owner", "outcome, follow-ups and result in one transaction"),
    Transition("started", "failed", "owner or reconciler", "attempts used up, permanent error, or lost too often"),
    Transition("started", "scheduled", "owner or reconciler", "to be tried again later"),
    Transition("started", "queued", "owner or reconciler", "interrupted (not counted), or lost and safe to run again"),
    Transition("started", "in_doubt", "owner or reconciler", "an effect may have happened and nobody knows"),
    Transition("started", "cancelled", "owner or reconciler", "cancel was requested"),
    Transition("queued", "parked", "worker", "this release cannot run it"),
    Transition("claimed", "parked", "worker", "this release cannot run it"),
    Transition("parked", "queued", "worker", "this release can run it"),
    Transition("queued", "failed", "scheduler", "its deadline passed"),
    Transition("scheduled", "failed", "scheduler", "its deadline passed"),
    Transition("in_doubt", "completed", "person or reconcile function", "it is known to have happened"),
    Transition("in_doubt", "failed", "person or reconcile function", "it is given up"),
    Transition("in_doubt", "queued", "person or reconcile function", "it is known not to have happened"),
    Transition("denied", "queued", "person", "the cap or the policy changed; bounded"),
    Transition("failed", "queued", "person", "an approved, bounded replay"),
    Transition("queued", "cancelled", "person", "asked for"),
    Transition("scheduled", "cancelled", "person", "asked for"),
    Transition("denied", "cancelled", "person", "asked for"),
    Transition("parked", "cancelled", "person", "asked for"),
)

#: The table as pairs, phases kept apart: what a recorded history is checked against.
LEGAL = frozenset((t.source, t.target) for t in TRANSITIONS)
