"""What goes into the verbs of the store and comes out of them.  Plain values: no clock, no I/O."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ActiveRow",
    "Attempt",
    "Beat",
    "Claimed",
    "Due",
    "Evidence",
    "FollowUpResult",
    "NewJob",
    "Outcome",
    "Payload",
    "Reaped",
    "Standing",
    "Token",
    "Waiting",
    "WorkerInfo",
]


class Token(NamedTuple):
    """The fencing token of one job: every write about a running job names it.

    Parameters:
      id(str): The job.
      owner(str): The worker process.
      claim(int): The row's claim counter when this owner took the job.
    """

    id: str
    owner: str
    claim: int


class NewJob(NamedTuple):
    """A row to be.

    Parameters:
      id(str): The message id.
      queue(str): The canonical queue name (never ``x.DQ``).
      actor(str): The actor's name.
      agent(str): Whom its spend is charged to.
      payload(bytes): The encoded message, as sent.
      delay(int): Milliseconds from now until it is due; ``None`` for a job that is ready.
      due_at(int): The same as a time (epoch milliseconds), for messages that carry an ``eta``; wins over *delay*.
      broker_ref(str): The broker's own id of the copy that the caller is about to publish.  ``None`` when nobody is
        about to: then the scheduler publishes the job.
      parent_id(str): The job that sent it.
      origin(str): ``sent``, ``child``, ``follow_up`` or ``adopted``.
      parked(str): Why the job is parked from birth (``"no_row"``), or ``None``.
    """

    id: str
    queue: str
    actor: str
    agent: str
    payload: bytes
    delay: int | None = None
    due_at: int | None = None
    broker_ref: str | None = None
    parent_id: str | None = None
    origin: str = "sent"
    parked: str | None = None


class Claimed(NamedTuple):
    """A job that was just claimed.

    Parameters:
      id(str): The job.
      claim(int): The claim counter, second half of the fencing token.
      revision(int): Which version of the payload is to run; a message of another revision must be reloaded.
      attempt(int): Starts so far.
      retries(int): Failed attempts that count against the retry limit.
      lost_claims(int): How often a claim on it ran out; anything but 0 asks for a strict start.
      lost(int): How often a started run was lost.
    """

    id: str
    claim: int
    revision: int
    attempt: int
    retries: int
    lost_claims: int
    lost: int


class Standing(NamedTuple):
    """Where a job stands, for a worker that could not claim it."""

    id: str
    state: str
    owner: str | None
    claim: int


class Payload(NamedTuple):
    """What a job runs.

    Parameters:
      id(str): The job.
      payload(bytes): The encoded message.
      options(bytes): Encoded options that replace those inside *payload*, or ``None``.
      revision(int): Its version.
      retries(int): Failed attempts that count against the retry limit.
    """

    id: str
    payload: bytes
    options: bytes | None
    revision: int
    retries: int


class Due(NamedTuple):
    """A job that is to be handed to the broker now; like :class:`Payload`, with its queue and the reference to use."""

    id: str
    queue: str
    payload: bytes
    options: bytes | None
    revision: int
    retries: int
    broker_ref: str


class Evidence(NamedTuple):
    """What is kept of an attempt that did not succeed.  Redacted before it gets here."""

    type: str
    message: str
    traceback: str


class FollowUpResult(NamedTuple):
    """A result for the results backend, stored together with the outcome.

    Parameters:
      key(str): The backend's message key.
      value(bytes): The encoded result.
      ttl(int): Milliseconds the backend is to keep it.
    """

    key: str
    value: bytes
    ttl: int


class Outcome(NamedTuple):
    """How one run ended.

    Parameters:
      id(str): The job.
      claim(int): The claim under which it ran.
      kind(str): ``completed``, ``failed``, ``retry``, ``interrupted``, ``released``, ``parked`` or ``skipped``.
      started(bool): Whether its actor may have run.  A run that was not started strictly counts its attempt here.
      ran_for(int): Milliseconds since its actor began; gives ``started_at`` of a run that was not started strictly.
      delay(int): For a retry, milliseconds until it is due (0: at once).
      options(bytes): For a retry, the encoded options that the next run's message carries.
      payload(bytes): For a retry with other arguments, the encoded message that replaces the payload.
      counted(bool): For a retry, whether it counts against the retry limit.
      reason(str): A short word for why, kept on the row.
      evidence(Evidence): What broke.
      follow_ups(tuple): The jobs that this run sends on.
      results(tuple): The results that it stores.
    """

    id: str
    claim: int
    kind: str
    started: bool = True
    ran_for: int = 0
    delay: int = 0
    options: bytes | None = None
    payload: bytes | None = None
    counted: bool = True
    reason: str | None = None
    evidence: Evidence | None = None
    follow_ups: tuple[NewJob, ...] = ()
    results: tuple[FollowUpResult, ...] = ()


class Beat(NamedTuple):
    """The answer to a heartbeat.

    Parameters:
      renewed(frozenset): The (id, claim) pairs whose lease was renewed.
      strays(tuple): (id, claim, started) of rows that carry this owner's name but were not in its list.
    """

    renewed: frozenset[tuple[str, int]]
    strays: tuple[tuple[str, int, bool], ...]


class ActiveRow(NamedTuple):
    """An active job as the reaper sees it.

    Parameters:
      id(str): The job.
      claim(int): Its claim counter.
      beat(int): Grows at every renewal.
      expired(bool): Whether its lease ran out by the database's clock.  Always true on SQLite, which has no clock of
        its own: there the reaper's memory of *beat* decides.
    """

    id: str
    claim: int
    beat: int
    expired: bool


class Reaped(NamedTuple):
    """What became of jobs whose owner was lost."""

    requeued: int
    failed: int
    in_doubt: int


class Waiting(NamedTuple):
    """A queued job that was published a while ago."""

    id: str
    queue: str
    broker_ref: str | None


class Attempt(NamedTuple):
    """One run that did not succeed."""

    attempt: int
    claim: int
    owner: str
    host: str | None
    started_at: int | None
    ended_at: int
    ended: str
    error_type: str | None
    error_message: str | None
    traceback: str | None


class WorkerInfo(NamedTuple):
    """A worker process, for people to look at.  Nothing is decided by it: leases are on the rows."""

    owner: str
    host: str
    pid: int
    threads: int
    queues: str
