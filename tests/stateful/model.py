"""The record as a few lines of plain Python: what the verbs promise, without a database, clock or concurrency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["ENDS", "Job", "Model"]

#: The ends of a run after which its job is final.
ENDS = {"completed": "completed", "failed": "failed", "skipped": "cancelled"}


@dataclass
class Job:
    """What a row must look like.

    Parameters:
      publish(str): Whether it is to be handed to the broker ``"now"``, ``"later"``, or not (``None``).
      expired(bool): Whether its lease has run out.
    """

    state: str
    publish: str | None = None
    ref: str | None = None
    owner: str | None = None
    claim: int = 0
    beat: int = 0
    started: bool = False
    expired: bool = False
    on_lost: str | None = None
    alone: int = 0
    revision: int = 1
    attempt: int = 0
    retries: int = 0
    lost_claims: int = 0
    lost: int = 0
    interruptions: int = 0
    publishes: int = 0
    put_back: int = 0
    reason: str | None = None

    def queue(self, reason: str | None) -> None:
        """Nobody has it any more."""
        self.state, self.publish, self.reason = "queued", "now", reason
        self.let_go()

    def let_go(self) -> None:
        self.owner, self.started, self.expired = None, False, False
        self.claim += 1

    def has(self, owner: str, claim: int) -> bool:
        return self.state == "active" and self.owner == owner and self.claim == claim


@dataclass
class Model:
    """All rows, and the ends of runs that are written: by job, claim and owner, the kind."""

    max_lost: int
    max_interruptions: int
    #: Whether the database has a clock by which a lease must have run out.
    has_clock: bool
    jobs: dict[str, Job] = field(default_factory=dict)
    ends: dict[tuple[str, int, str], str] = field(default_factory=dict)

    def record(self, id: str, *, delayed: bool = False, ref: str | None = None, parked: str | None = None) -> bool:
        if id in self.jobs:
            return False
        if parked:
            self.jobs[id] = Job("parked", reason=parked)
        elif delayed:
            self.jobs[id] = Job("scheduled", "later")
        else:
            self.jobs[id] = Job("queued", None if ref else "now", ref, publishes=int(ref is not None))
        return True

    def runs(self, id: str, owner: str, claim: int) -> bool:
        return id in self.jobs and self.jobs[id].has(owner, claim)

    def claim(self, owner: str, ids: Iterable[str], again: bool) -> dict[str, int]:
        granted = {}
        for id in set(ids) & self.jobs.keys():
            job = self.jobs[id]
            if job.state == "queued":
                job.state, job.owner, job.publish, job.reason = "active", owner, None, None
                job.claim += 1
                job.started, job.expired, job.on_lost, job.alone = False, False, None, 0
                granted[id] = job.claim
            elif again and job.state == "active" and job.owner == owner and not job.started:
                job.beat += 1
                job.expired = False
                granted[id] = job.claim
        return granted

    def start(self, owner: str, id: str, claim: int, on_lost: str, alone: int) -> int | None:
        if not self.runs(id, owner, claim):
            return None
        job = self.jobs[id]
        if not job.started:
            job.attempt += 1
        job.started, job.expired, job.on_lost, job.alone = True, False, on_lost, alone
        job.beat += 1
        return job.attempt

    def renew(self, owner: str, held: dict[str, tuple[int, bool]]) -> tuple[set[str], set[str]]:
        renewed, strays = set(), set()
        for id, job in self.jobs.items():
            if job.state != "active" or job.owner != owner:
                continue
            claim, began = held.get(id, (None, False))
            if claim != job.claim:
                strays.add(id)
                continue
            renewed.add(id)
            job.beat += 1
            job.expired = False
            if began and not job.started:
                job.started, job.on_lost = True, "rerun"
                job.attempt += 1
        return renewed, strays

    def release(self, owner: str, id: str, claim: int, reason: str) -> bool:
        if not self.runs(id, owner, claim) or self.jobs[id].started:
            return False
        self.jobs[id].queue(reason)
        return True

    def settle(self, owner: str, id: str, claim: int, kind: str, *, started: bool, delay: int, changed: bool) -> bool:
        """Return whether the outcome is written, now or by an earlier call."""
        unstarted_only = kind in ("released", "parked", "skipped") or kind == "failed" and not started
        if not self.runs(id, owner, claim) or unstarted_only and self.jobs[id].started:
            return self._is_written(owner, id, claim, kind)
        job = self.jobs[id]
        if started and not job.started and kind not in ("released", "parked", "skipped"):
            job.attempt += 1
            job.started = True
        if kind in ("completed", "failed", "skipped"):
            job.state = ENDS[kind]
            job.reason = None if kind == "completed" else kind
        elif kind == "retry":
            job.queue(kind)
            if delay:
                job.state, job.publish = "scheduled", "later"
            job.retries += 1
            job.revision += int(changed)
            job.on_lost = None
        elif kind == "interrupted":
            self._interrupt(job, owner)
        elif kind == "released":
            job.queue(kind)
        else:
            job.state, job.reason = "parked", kind
            job.let_go()
        if started:
            self.ends[id, claim, owner] = kind
        return True

    def _interrupt(self, job: Job, owner: str) -> None:
        job.attempt -= int(job.started)
        job.on_lost = None
        job.interruptions += 1
        job.queue("interrupted")
        if job.interruptions > self.max_interruptions:
            job.state, job.publish, job.owner, job.reason = "failed", None, owner, "interrupted_too_often"

    def _is_written(self, owner: str, id: str, claim: int, kind: str) -> bool:
        job = self.jobs.get(id)
        if job is None:
            return False
        if kind in ENDS and job.claim == claim and job.owner == owner and job.state == ENDS[kind]:
            return True
        if kind in ("released", "parked"):
            # Somebody has given it back or parked it: it makes no difference who
            state = "queued" if kind == "released" else kind
            return job.state == state and job.claim == claim + 1 and job.owner is None
        return kind in ("retry", "interrupted", "failed") and self.ends.get((id, claim, owner)) == kind

    def reap(self, watched: Iterable[tuple[str, int, int]]) -> tuple[int, int, int]:
        requeued = failed = in_doubt = 0
        for id, claim, beat in watched:
            job = self.jobs[id]
            if job.state != "active" or (job.claim, job.beat) != (claim, beat) or self.has_clock and not job.expired:
                continue
            if not job.started:
                job.queue("lease_expired")
                job.lost_claims += 1
                job.put_back += 1
                requeued += 1
                continue
            job.lost += 1
            owner = job.owner
            limit = self.max_lost if job.alone else 3 * self.max_lost
            if job.on_lost == "fail" or job.lost >= limit:
                job.state = "failed"
                failed += 1
            elif job.on_lost == "hold":
                job.state = "in_doubt"
                in_doubt += 1
            else:
                job.queue(None)
                job.retries += 1
                job.put_back += 1
                requeued += 1
            job.reason = "worker_lost"
            if job.state != "queued":
                job.claim += 1
                job.owner = owner
        return requeued, failed, in_doubt

    def take_due(self) -> set[str]:
        due = {id for id, job in self.jobs.items() if job.publish == "now"}
        for id in due:
            job = self.jobs[id]
            job.state, job.publish = "queued", None
            job.publishes += 1
            job.ref = f"{id}.{job.publishes}"
        return due

    def waits(self, id: str, ref: str | None) -> bool:
        job = self.jobs[id]
        return job.state == "queued" and job.publish is None and job.ref == ref

    def unpublish(self, id: str, ref: str | None, delayed: bool) -> bool:
        if not self.waits(id, ref):
            return False
        self.jobs[id].publish = "later" if delayed else "now"
        return True

    def put_back(self, id: str, ref: str | None) -> bool:
        if not self.waits(id, ref):
            return False
        self.jobs[id].publish = "now"
        self.jobs[id].put_back += 1
        return True

    def unpark(self, id: str) -> bool:
        job = self.jobs[id]
        if job.state != "parked" or job.reason != "unknown_actor":
            return False
        job.state, job.publish, job.reason = "queued", "now", None
        return True
