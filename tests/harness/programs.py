"""Processes that are not started by the ``dramatiq`` command, as applications have them.

Run as ``python -m tests.harness.programs NAME [ARGUMENT...]``; what they find out goes to the journal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import dramatiq

from tests.harness.app import broker, journal, quick, wait_for


def handle() -> Any:
    return broker.durable  # type: ignore[attr-defined]


def note_identity(name: str) -> None:
    """Say who this process is for the record and for the broker."""
    journal.note(name, handle().engine.owner, broker.broker_id)


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("durable-"))


def fork(child: Callable[[], None]) -> int:
    """Run *child* in a forked process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        child()
        code = 0
    except BaseException as e:
        journal.note("raised", type(e).__name__, str(e))
    finally:
        os._exit(code)


def wait_for_child(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"child {pid} ended with {status}"


def work(name: str) -> None:
    """Run a plain worker until a file appears."""
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=4)
    worker.start()
    try:
        journal.note("working", name, own_threads())
        wait_for(name)
    finally:
        worker.stop(10_000)
    journal.note("stopped", name, own_threads())


def plain(name: str) -> None:
    """A plain worker."""
    work(name)


def lives_on(stop: str, leave: str) -> None:
    """A plain worker in a process that goes on when the worker has stopped."""
    work(stop)
    wait_for(leave)


def send_only(count: str) -> None:
    """Sends, and never runs a worker."""
    for i in range(int(count)):
        quick.send(i)
    quick.send_with_options(args=("later",), delay=300)
    journal.note("sent", "all", own_threads())


def preloaded(children: str, each: str) -> None:
    """A server that loads the application and uses it, then forks; all of them send at the same time."""

    def send_all() -> None:
        note_identity("identity")
        for i in range(int(each)):
            quick.send(i)

    quick.send("parent before")
    pids = [fork(send_all) for _ in range(int(children))]
    send_all()
    for pid in pids:
        wait_for_child(pid)


def forked_worker(running: str) -> None:
    """A worker in a forked child, after the parent had one that is stopped, or still runs."""
    note_identity("identity")
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    wait_for("fork")
    if running != "yes":
        worker.stop(10_000)

    def child() -> None:
        note_identity("identity")
        work("child stop")

    pid = fork(child)
    journal.note("forked", str(pid))
    if running == "yes":
        wait_for("parent stop")
        worker.stop(10_000)
    wait_for_child(pid)
    journal.note("stopped", "parent", own_threads())


def main() -> None:
    name, *arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
