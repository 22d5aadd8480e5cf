"""What the demo shows: where things stand, and what came of it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Report", "Snapshot"]


class Snapshot(NamedTuple):
    """Where things stand right now, by the journal alone."""

    seconds: float
    sent: int
    completed: int
    running: int
    attempts: int


class Report(NamedTuple):
    """What came of it.

    Parameters:
      sent(int): Jobs that were sent, the stages of pipelines included.
      completed(int): Of those, how many the journal and the record agree are done.
      lost(int): The others.
      concurrent_runs(int): How often a job ran while another run of it was not over.
      repeated(int): Jobs that began again after they were finished.
      attempts(int): Runs in all.
      reconciled(int): Jobs that reconciliation put right: put back into the queue, or taken over from dead workers.
      put_back(int), taken_over(int): The two kinds.
      worker_kills(int): Worker processes that got a SIGKILL.
      broker_flushes(int): How often a FLUSHALL emptied the queue.
      broker_kills(int): How often Valkey was killed and started empty.
      seconds(float): How long it took.
      culprits(list): The ids of jobs that broke a promise.
    """

    sent: int
    completed: int
    lost: int
    concurrent_runs: int
    repeated: int
    attempts: int
    reconciled: int
    put_back: int
    taken_over: int
    worker_kills: int
    broker_flushes: int
    broker_kills: int
    seconds: float
    culprits: list[str]

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.concurrent_runs or self.repeated)
