"""What must hold at the end: the journal that the jobs wrote, held against the tables and the broker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.harness.journal import Event
from tests.torture.plan import LEASE

__all__ = ["CHECKS", "Evidence", "Run", "violations"]

#: States in which nothing more happens by itself.
SETTLED = {"completed", "failed", "cancelled", "parked", "in_doubt", "denied"}

#: How jobs of an actor may end, and for which reason when not completed.
ENDS: dict[str, set[tuple[str, str | None]]] = defaultdict(
    lambda: {("completed", None), ("failed", "worker_lost")},
    breaks={("failed", "error"), ("failed", "worker_lost")},
    limited={("failed", "error"), ("failed", "worker_lost")},
    careful={("completed", None), ("in_doubt", "worker_lost"), ("failed", "worker_lost")},
)

#: By how much two readings of the machine's clock may differ after rounding (milliseconds).
CLOCKS = 5

#: How long a run may go on after its process woke up and found its job taken over (seconds).
WAKING = 3.0


@dataclass
class Run:
    """One run, as the journal has it."""

    job: str
    pid: int
    actor: str
    began: float
    wall: int
    ended: float | None = None
    ended_wall: int = 0
    how: str | None = None


@dataclass
class Evidence:
    """Everything that is known at the end.

    Parameters:
      events(list[Event]): The journal.
      jobs(dict): The rows of all jobs.
      attempts(list), results(list): The rows of these tables.
      deaths(dict), frozen(list), cut_off(list): Of the fleet.
      leftovers(list[str]): What the broker still holds.
      owners(dict): Which process each owner was.
      threads(dict): How many threads each process has that is alive at the end.
      log(list[str]): What the workers logged.
      stored(dict): Which result keys the results backend has.
      loss(int): When the broker lost data for the last time.
    """

    events: list[Event]
    jobs: dict[str, dict[str, Any]]
    attempts: list[dict[str, Any]]
    results: list[dict[str, Any]]
    deaths: dict[int, float]
    frozen: list[tuple[int, float, float]]
    cut_off: list[tuple[int, float, float]]
    leftovers: list[str]
    owners: dict[str, int]
    threads: dict[int, int]
    log: list[str]
    stored: dict[str, bool]
    loss: int
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        known: dict[str, Run] = {}
        for event in self.events:
            if event.event == "begin":
                run = Run(event.job, event.pid, event.detail["actor"], event.at, event.detail["wall"])
                known[event.detail["run"]] = run
                self.runs[event.job].append(run)
            elif event.event == "end" and event.detail["run"] in known:
                run = known[event.detail["run"]]
                run.ended, run.how, run.ended_wall = event.at, event.detail["how"], event.detail["wall"]
            elif event.event == "sending":
                self.asked[event.job] = event.detail
            elif event.event == "sent":
                self.sent.add(event.job)
        for runs in self.runs.values():
            runs.sort(key=lambda run: run.began)

    def end(self, run: Run) -> float:
        return run.ended if run.ended is not None else self.deaths.get(run.pid, float("inf"))

    def was_frozen(self, pid: int, since: float, until: float) -> bool:
        """Return whether *pid* was stopped at some time between two moments."""
        return any(p == pid and a < until and b > since for p, a, b in self.frozen)

    def was_cut_off(self, pid: int, since: float, until: float) -> bool:
        """Return whether *pid* was stopped, or could not reach the database, at some time between two moments."""
        return any(p == pid and a < until and b > since for p, a, b in self.frozen + self.cut_off)

    def of(self, parent: str, actor: str, origin: str) -> list[dict[str, Any]]:
        return [
            row
            for row in self.jobs.values()
            if row["parent_id"] == parent and row["actor"] == actor and row["origin"] == origin
        ]


def lost(e: Evidence) -> Iterable[str]:
    for id in e.sent - e.jobs.keys():
        yield f"{id} was sent and has no row: {e.asked[id]}"
    for id in e.runs.keys() - e.jobs.keys():
        yield f"{id} ran and has no row"


def stuck(e: Evidence) -> Iterable[str]:
    for id, row in e.jobs.items():
        if row["state"] not in SETTLED:
            yield f"{id} is still {row['state']}: {row}"


def twice_at_once(e: Evidence) -> Iterable[str]:
    for id, runs in e.runs.items():
        for i, left in enumerate(runs):
            for right in runs[i + 1 :]:
                if right.began < e.end(left) and not _excused(e, left, right):
                    yield f"{id} ({left.actor}): {left} beside {right}"


def _excused(e: Evidence, left: Run, right: Run) -> bool:
    """Whoever was frozen or cut off past its lease may still compute when another takes over, and not for long."""
    for pid, stopped, continued in e.frozen + e.cut_off:
        if pid == left.pid and continued - stopped >= LEASE - 0.5 and left.began < continued:
            if right.began > stopped and e.end(left) < continued + WAKING:
                return True
        if pid == right.pid and continued - stopped >= LEASE - 0.5 and stopped - 1 < right.began < continued + 1:
            # Stopped between its claim and its first line.
            return True
    return False


def after_the_end(e: Evidence) -> Iterable[str]:
    for id, runs in e.runs.items():
        row = e.jobs.get(id)
        if row is None or row["finished_at"] is None:
            continue
        for run in runs:
            if run.wall > row["finished_at"] + CLOCKS and not e.was_frozen(run.pid, run.began - 1, run.began + 0.1):
                yield f"{id} ({run.actor}) finished at {row['finished_at']} and {run} began: {row}"


def without_cause(e: Evidence) -> Iterable[str]:
    """A run that ended well may only be repeated if its process died or was stopped before it could say so."""
    for id, runs in e.runs.items():
        for left, right in zip(runs, runs[1:], strict=False):
            if left.how not in ("ok", None) or left.pid == right.pid and left.how is None:
                continue
            died = e.deaths.get(left.pid, float("inf")) <= right.began + 0.5
            if not died and not e.was_cut_off(left.pid, left.began - 1, right.began):
                yield f"{id} ({left.actor}): {left} ended, its process lives, and {right} began: {e.jobs.get(id)}"


def ends(e: Evidence) -> Iterable[str]:
    for id, row in e.jobs.items():
        if row["state"] not in SETTLED:
            continue
        if (row["state"], row["reason"]) not in ENDS[row["actor"]]:
            if not (row["actor"] == "once" and row["reason"] == "worker_lost"):
                yield f"{id} ({row['actor']}) ended as {row['state']} for {row['reason']}: {row}"
        runs = e.runs.get(id, [])
        if row["state"] == "completed" and not any(run.how == "ok" for run in runs):
            yield f"{id} is completed but never came to its end: {runs}"
        if row["reason"] == "worker_lost" and row["lost"] > len(e.deaths) + len(e.frozen + e.cut_off):
            yield f"{id} was lost {row['lost']} times, more often than anybody died: {row} {runs}"


def by_another(e: Evidence) -> Iterable[str]:
    """The run of the last owner, and no other, may complete a job, and not before it has ended."""
    for id, row in e.jobs.items():
        pid = e.owners.get(row["owner"])
        if row["state"] == "completed" and pid is not None:
            own = [run for run in e.runs.get(id, []) if run.pid == pid and run.how == "ok"]
            if not any(run.ended_wall <= row["finished_at"] + CLOCKS for run in own):
                yield f"{id} was completed by another run than its owner's, process {pid}: {row} {e.runs.get(id)}"


def stages(e: Evidence) -> Iterable[str]:
    for id, asked in e.asked.items():
        if asked["kind"] != "pipeline" or id not in e.jobs:
            continue
        for before, after in zip(asked["stages"], asked["stages"][1:], strict=False):
            done = before in e.jobs and e.jobs[before]["state"] == "completed"
            if done != (after in e.jobs):
                yield f"a stage of {id}: {e.jobs.get(before)}, the next: {e.jobs.get(after)}"


def callbacks(e: Evidence) -> Iterable[str]:
    for id, asked in e.asked.items():
        if asked.get("callback") and id in e.jobs:
            fired = len(e.of(id, "note_success", "follow_up"))
            if fired != (e.jobs[id]["state"] == "completed"):
                yield f"{id} is {e.jobs[id]['state']} and its callback fired {fired} times"


def children(e: Evidence) -> Iterable[str]:
    for id, row in e.jobs.items():
        if row["actor"] == "parent":
            wanted = e.asked[id]["children"] if id in e.asked else None
        elif row["actor"] == "coroutine":
            wanted = 1
        else:
            continue
        found = len(e.of(id, "quick", "child"))
        if wanted is not None and (found > wanted or row["state"] == "completed" and found != wanted):
            yield f"{id} is {row['state']} and has {found} children, not {wanted}"


def early(e: Evidence) -> Iterable[str]:
    for id, asked in e.asked.items():
        due = asked["wall"] + (asked["delay"] or 0)
        for run in e.runs.get(id, []):
            if run.wall < due - 20:
                yield f"{id} began {due - run.wall} ms before it was due"


def attempts(e: Evidence) -> Iterable[str]:
    """Every start has its reason: a failure of the job, a death or a stop of a process."""
    for id, runs in e.runs.items():
        ended_badly = sum(1 for run in runs if run.how not in ("ok", None))
        bound = 1 + ended_badly + len({run.pid for run in runs if run.pid in e.deaths}) + len(e.frozen + e.cut_off)
        if len(runs) > min(bound, 14):
            yield f"{id} began {len(runs)} times: {runs}"
    for row in e.jobs.values():
        if row["lost"] > 9 or row["retries"] > 13:
            yield f"too many: {row}"


def results(e: Evidence) -> Iterable[str]:
    have = defaultdict(list)
    for result in e.results:
        have[result["job_id"]].append(result)
    for id, row in e.jobs.items():
        if row["state"] == "completed" and row["actor"] in ("quick", "stage", "coroutine") and len(have[id]) != 1:
            yield f"{id} ({row['actor']}) is completed and has {len(have[id])} results"
    for result in e.results:
        if result["stored_at"] is None:
            yield f"the result of {result['job_id']} was never stored"
        elif result["created_at"] > e.loss and not e.stored.get(result["key"]):
            yield f"the result of {result['job_id']} was stored after the last loss and is not there"


def orphans(e: Evidence) -> Iterable[str]:
    yield from e.leftovers


def idle_threads(e: Evidence) -> Iterable[str]:
    """At the end there was enough for everybody to do at once."""
    for pid, threads in e.threads.items():
        runs = [run for id, asked in e.asked.items() if asked["kind"] == "probe" for run in e.runs.get(id, [])]
        mine = [run for run in runs if run.pid == pid and run.ended is not None]
        busiest = max((sum(r.began <= run.began < e.end(r) for r in mine) for run in mine), default=0)
        if busiest < threads:
            yield f"process {pid} has {threads} threads, and at most {busiest} of them worked at the end"


def surprises(e: Evidence) -> Iterable[str]:
    for line in e.log:
        if any(words in line for words in ("Unexpected failure", "Exception in thread", "could not be determined")):
            yield line


#: Each check, with what its number in the final table means.
CHECKS = {
    "jobs lost": lost,
    "stuck at the end": stuck,
    "two runs at once": twice_at_once,
    "finished, then run again": after_the_end,
    "ended well, repeated without cause": without_cause,
    "illegal ends": ends,
    "completed by a run that had lost it": by_another,
    "pipeline stages missing or too many": stages,
    "callbacks missing or too many": callbacks,
    "children missing or too many": children,
    "begun before they were due": early,
    "begun too often": attempts,
    "results missing": results,
    "left in the broker": orphans,
    "threads that no longer work": idle_threads,
    "surprises in the logs": surprises,
}


def violations(evidence: Evidence) -> dict[str, list[str]]:
    """Return what each check found."""
    return {name: list(check(evidence)) for name, check in CHECKS.items()}
