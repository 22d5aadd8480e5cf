"""Copies that a consumer was given and never answers: the reply to a fetch was lost, or the consumer forgot them.

While the process lives, the broker gives them to nobody else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..store import jobs, recovery
from ..store.types import Waiting

if TYPE_CHECKING:
    from ..brokers.base import BrokerView
    from ..store.database import Database

__all__ = ["Strandings", "give_back", "put_back_stranded"]

#: When each copy was first seen in a consumer's hands: by job and reference if its row waits for it, else by queue and
#: reference.
Strandings = dict[tuple[str, str | None], float]


def put_back_stranded(
    db: Database, view: BrokerView, page: list[Waiting], after: float, known: Strandings, held: Strandings
) -> int:
    """Put back jobs whose copy has been in a consumer's hands for too long without their row being claimed.

    Parameters:
      db(Database)
      view(BrokerView)
      page(list[Waiting]): Queued jobs whose copies are in the broker.
      after(float): How long is too long (seconds).
      known(dict): What the look before has seen.
      held(dict): What this look sees; added to.

    Returns:
      int: How many were put back.
    """
    in_hand = view.stranded(page) if view.can_look else set()
    now = time.monotonic()
    overdue = []
    for row in page:
        if row.id in in_hand:
            key = (row.id, row.broker_ref)
            held[key] = known.get(key, now)
            if now - held[key] >= after:
                overdue.append(row)
    if not overdue:
        return 0
    done = recovery.put_back(db, [(row.id, row.broker_ref) for row in overdue])
    view.discard([row for row in overdue if row.id in done])
    return len(done)


def give_back(db: Database, view: BrokerView, after: float, known: Strandings, held: Strandings) -> None:
    """Put copies back into their queues that no queued row waits for and nobody works on.

    They are late or second copies, copies of jobs that are not recorded yet, or cannot be read.  Whoever fetches them
    next finds out; until then they would take up room in the broker, and an unrecorded job would never run.
    """
    now = time.monotonic()
    overdue = []
    for copy in view.in_hand():
        held[copy] = known.get(copy, now)
        if now - held[copy] >= after:
            overdue.append(copy)
    if not overdue:
        return
    ids = view.identify(overdue)
    standing = jobs.locate(db, list(set(ids.values())))
    idle = []
    for copy in overdue:
        row = standing.get(ids.get(copy, ""))
        # One whose row is queued is put_back_stranded()'s, and one whose job is running is about to be answered.
        if row is None or row.state not in ("queued", "active"):
            idle.append(copy)
    if idle:
        view.give_back(idle)
