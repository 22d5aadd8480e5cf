"""Two equipped brokers in one process, each with a record of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.middleware import Middleware

from dramatiq_durable.store import reading
from tests.inprocess.conftest import Bench


def test_a_job_of_one_broker_sends_to_the_other(bench_at: Callable[..., Bench], tmp_path: Path) -> None:
    """From the actor and from an after-hook: the job is recorded where it belongs, and runs there."""
    runs: list[str] = []

    class Reports(Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            if message.actor_name == "here":
                there.send("hook")

    one = bench_at(f"sqlite:///{tmp_path}/one.sqlite3", Reports())
    two = bench_at(f"sqlite:///{tmp_path}/two.sqlite3")

    @dramatiq.actor(broker=one.broker, max_retries=0)
    def here() -> None:
        runs.append("here")
        there.send("actor")

    @dramatiq.actor(broker=two.broker)
    def there(source: str) -> None:
        runs.append(source)

    here.send()
    one.work()
    two.work()
    one.join()
    deadline = time.monotonic() + 10
    while len(runs) < 3:
        assert time.monotonic() < deadline, runs
        time.sleep(0.02)
    two.join()
    assert sorted(runs) == ["actor", "here", "hook"]
    assert {row.actor for row in reading.list_jobs(one.db)} == {"here"}
    assert {row.actor for row in reading.list_jobs(two.db)} == {"there"}
    assert {row.state for row in reading.list_jobs(two.db)} == {"completed"}
