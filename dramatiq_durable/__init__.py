"""Durable jobs for Dramatiq: the database is the record of every job, the queue only runs the work."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Durable",
    "DurableError",
    "DurableRecord",
    "JobState",
    "LeaseLost",
    "Reconciler",
    "Settings",
    "install",
]

#: Where each public name lives.  They are imported when they are first asked for: settings alone cost more than the
#: rest.  No module may be called like a public name: importing it would put the module in the name's place.
_HOMES = {
    "Durable": "equip",
    "DurableError": "errors",
    "DurableRecord": "middleware.record",
    "JobState": "states",
    "LeaseLost": "errors",
    "Reconciler": "middleware.reconciler",
    "Settings": "settings",
    "install": "equip",
}

if TYPE_CHECKING:
    from .equip import Durable, install
    from .errors import DurableError, LeaseLost
    from .middleware.reconciler import Reconciler
    from .middleware.record import DurableRecord
    from .settings import Settings
    from .states import JobState


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
