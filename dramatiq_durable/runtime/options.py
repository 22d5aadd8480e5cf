"""The numbers that the moving parts work with.  Settings are read and checked elsewhere; these are plain values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STOP_TIMEOUT", "Options"]

#: How long a stop waits for a thread of ours (seconds); it may be stuck in a database that does not answer, and is a
#: daemon.
STOP_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """See the settings of the same names; times in milliseconds, sizes in bytes."""

    lease: int = 60_000
    heartbeat_interval: int = 10_000
    reconcile_interval: int = 60_000
    scheduler_interval: int = 500
    publish_grace: int = 5_000
    max_lost: int = 3
    max_interruptions: int = 20
    max_payload: int = 65_536
    on_publish_error: str = "warn"
    commit_batch: int = 100
    shutdown_timeout: int = 5_000
    adopt: bool = True
