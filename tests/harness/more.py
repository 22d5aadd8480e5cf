"""A module that the ``dramatiq`` command loads beside the application: slow to import, with a queue of its own."""

from __future__ import annotations

import os
import time

import dramatiq

from tests.harness.app import journal, me

# Whatever begins before all modules are imported has the time to do harm.
journal.note("importing", "more")
time.sleep(float(os.environ.get("DURABLE_TEST_SLOW_IMPORT", "0")))
journal.note("imported", "more")


@dramatiq.actor(queue_name="more")
def extra(value: int) -> None:
    journal.note("begin", me())
    journal.note("end", me(), value)
