"""How fast reconciliation looks through waiting jobs, and puts lost ones back.

    python -m tests.benchmarks.reconcile [--jobs 100000] [--database sqlite|postgresql]

Prints figures; nothing depends on them.  The rows are real jobs, published to a real server.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker

import dramatiq_durable as durable
from dramatiq_durable.runtime import messages
from dramatiq_durable.runtime.current import thread
from dramatiq_durable.runtime.sending import Sending
from dramatiq_durable.runtime.sweeper import look
from dramatiq_durable.store import jobs, migrate, recovery
from tests.servers import Postgres, Valkey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    arguments = parser.parse_args()
    valkey = Valkey()
    postgres = Postgres(durable=True) if arguments.database == "postgresql" else None
    with tempfile.TemporaryDirectory() as room:
        try:
            valkey.start()
            if postgres is not None:
                postgres.start()
            url = postgres.create() if postgres is not None else f"sqlite:///{Path(room)}/record.sqlite3"
            _measure(url, valkey, arguments.jobs)
        finally:
            valkey.close()
            if postgres is not None:
                postgres.close()


def _measure(url: str, valkey: Valkey, number: int) -> None:
    broker = RedisBroker(url=valkey.url)
    handle = durable.install(broker, database_url=url, profile="production")
    migrate.upgrade(handle.db)

    @dramatiq.actor(broker=broker)
    def nothing(x: int) -> None: ...

    engine = handle.engine
    thread.sending = Sending(quiet=True)
    with _Timed("record", number):
        for start in range(0, number, 1_000):
            chunk = [messages.marked(nothing.message(i)) for i in range(start, min(start + 1_000, number))]
            jobs.record_many(handle.db, [messages.new_job(broker, m, max_payload=None, broker_ref=None) for m in chunk])
    with _Timed("publish all", number):
        while recovery.next_due(handle.db) is not None:
            engine.scheduler.publish_due()
    with _Timed("look, all present", number):
        found = look(handle.db, engine.view, grace=0, stranded_after=60, strandings={})
    assert found == (number, 0), found
    valkey.flush()
    with _Timed("look, all lost", number):
        found = look(handle.db, engine.view, grace=0, stranded_after=60, strandings={})
    assert found == (number, number), found
    with _Timed("publish all again", number):
        while recovery.next_due(handle.db) is not None:
            engine.scheduler.publish_due()
    assert broker.client.llen("dramatiq:default") == number
    handle.uninstall()


class _Timed:
    def __init__(self, what: str, number: int) -> None:
        self.what, self.number = what, number

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self.began
        print(f"{self.what:20} {took:8.2f} s {self.number / took:12,.0f} /s", flush=True)


if __name__ == "__main__":
    main()
