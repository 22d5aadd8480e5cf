"""Which job this thread or coroutine is running, and what its after-hooks are sending on."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture import Capture
    from .held import Run
    from .sending import Sending

__all__ = ["RUN", "thread"]

#: The run whose actor is executing.  A context variable and not a thread-local: coroutines run on another thread.
RUN: ContextVar[Run | None] = ContextVar("dramatiq_durable_run", default=None)


class _Thread(threading.local):
    """What belongs to this thread alone.

    Attributes:
      capture(Capture): Collects what the after-hooks of the finished run send on, or ``None``.
      sending(Sending): The message that this thread is handing to the broker, or ``None``.
      settled(Run): The run whose outcome this thread decided last: late writes of its result are not let through.
    """

    capture: Capture | None = None
    sending: Sending | None = None
    settled: Run | None = None


thread = _Thread()
