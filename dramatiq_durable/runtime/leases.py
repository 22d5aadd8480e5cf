"""When an owner must be presumed dead: what a process remembers of the leases that it watches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..store.types import ActiveRow

__all__ = ["LeaseWatch"]


class LeaseWatch:
    """Remembers how long each active row's lease has stood still, on this process's monotonic clock.

    A job may be taken over only when its renewal counter has not moved for a whole lease in which the database was
    reachable without a break: an outage, or a pause of this very process, costs nobody a job.

    Parameters:
      lease(float): Seconds.
      interval(float): How often :meth:`observe` is called (seconds).  A longer gap means that this process was not
        looking, and everything is forgotten.
    """

    def __init__(self, lease: float, interval: float) -> None:
        self._lease = lease
        self._gap = max(3 * interval, 1.0)
        self._seen: dict[str, tuple[int, int, float]] = {}
        self._last: float | None = None

    def forget(self) -> None:
        """The database was away."""
        self._seen = {}
        self._last = None

    def late(self, now: float, notice: float) -> list[str]:
        """Return the rows that will be given up within *notice* seconds unless they are renewed."""
        return [id for id, (_, _, since) in self._seen.items() if now - since >= self._lease - notice]

    def restart(self, ids: Iterable[str]) -> None:
        """Watch rows anew, for a whole lease."""
        for id in ids:
            self._seen.pop(id, None)

    def observe(self, rows: list[ActiveRow], now: float) -> list[ActiveRow]:
        """Take note of *rows*, all that are active now; return those whose owner must be presumed dead."""
        if self._last is not None and now - self._last > self._gap:
            self._seen = {}
        self._last = now
        seen: dict[str, tuple[int, int, float]] = {}
        overdue: list[ActiveRow] = []
        for row in rows:
            known = self._seen.get(row.id)
            if known is None or known[:2] != (row.claim, row.beat):
                known = (row.claim, row.beat, now)
            elif row.expired and now - known[2] >= self._lease:
                overdue.append(row)
            seen[row.id] = known
        self._seen = seen
        return overdue
