"""Making the faults that a plan asks for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.servers import Postgres, Valkey
from tests.torture.fleet import TorturedFleet
from tests.torture.links import Links
from tests.torture.plan import Fault

__all__ = ["Faults"]


class Faults:
    """Knows what may break, and breaks it.

    Parameters:
      fleet(TorturedFleet)
      broker(Valkey)
      broker_link(Links): What the workers reach it through.
      database(Postgres | Path): The server, or the file.
      database_link(Links): What the workers reach the server through.
      name(str): The database on the server.

    Attributes:
      log(list): What was done: seconds since the start, and words.
      losses(list): When the broker lost data (epoch milliseconds, the end of each loss).
    """

    def __init__(
        self,
        fleet: TorturedFleet,
        broker: Valkey,
        broker_link: Links,
        database: Postgres | Path,
        database_link: Links | None,
        name: str = "",
    ) -> None:
        self.fleet = fleet
        self.broker = broker
        self.broker_link = broker_link
        self.database = database
        self.database_link = database_link
        self.name = name
        self.log: list[tuple[float, str]] = []
        self.losses: list[int] = []
        self.errors: list[str] = []
        self._began = time.monotonic()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._threads: list[threading.Thread] = []
        self._starter = ThreadPoolExecutor(1)
        self._kept = broker.directory / "kept"

    def run(self, plan: list[Fault]) -> None:
        """Make all faults of *plan* at their times, and return when the last one is over."""
        self._began = time.monotonic()
        for fault in plan:
            time.sleep(max(0.0, self._began + fault.at - time.monotonic()))
            thread = threading.Thread(target=self._make, args=(fault,), name=str(fault), daemon=True)
            thread.start()
            self._threads.append(thread)
        for thread in self._threads:
            thread.join(90)
            if thread.is_alive():
                self.errors.append(f"{thread.name} did not come to an end")

    def _make(self, fault: Fault) -> None:
        with self._locks[fault.target]:
            began = time.monotonic() - self._began
            try:
                said = getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)
            except Exception as e:
                said = f"could not be made: {e!r}"
                self.errors.append(f"{fault}: {e!r}")
            ended = time.monotonic() - self._began
            self.log.append((began, f"{fault} (until {ended:.1f}) {said or ''}".rstrip()))

    # Workers

    def _kill(self, fault: Fault) -> str:
        return self.fleet.kill(_slot(fault))

    def _kill_master(self, fault: Fault) -> str:
        return self.fleet.kill_master(_slot(fault), fault.seconds)

    def _deploy(self, fault: Fault) -> str:
        return self.fleet.deploy(_slot(fault))

    def _deploy_hastily(self, fault: Fault) -> str:
        return self.fleet.deploy(_slot(fault), fault.seconds)

    def _kill_all(self, fault: Fault) -> str:
        return "; ".join(self.fleet.kill(slot) for slot in range(len(self.fleet.slots)))

    def _freeze(self, fault: Fault) -> str:
        return self.fleet.freeze(_slot(fault), fault.seconds)

    def _cut_worker_off_from_broker(self, fault: Fault) -> None:
        _cut(self.broker_link.each[_slot(fault)], fault)

    def _cut_worker_off(self, fault: Fault) -> str:
        """One worker cannot reach the database; the others can, and take over."""
        slot, began = _slot(fault), time.monotonic()
        found = self.fleet.processes(slot)
        _black_hole(self._link().each[slot], fault)
        # It may have been killed and started again meanwhile.
        found = sorted({*found, *self.fleet.processes(slot)})
        self.fleet.cut_off += [(pid, began, time.monotonic()) for pid in found]
        return f"pids {found}"

    # The broker

    def _flush(self, fault: Fault) -> None:
        self.broker.flush()
        self._note_loss()

    def _restart(self, fault: Fault) -> None:
        self.broker.kill()
        kept = self.broker.directory / "appendonlydir"
        if fault.detail != "keeping its data":
            if fault.detail == "empty":
                # What was there may come back some day: a replica that was cut off, a restored backup.
                shutil.rmtree(self._kept, ignore_errors=True)
                if kept.exists():
                    kept.rename(self._kept)
            elif self._kept.exists():
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(self._kept, kept)
        time.sleep(fault.seconds)
        self._start(self.broker)
        if fault.detail != "keeping its data":
            self._note_loss()

    def _stall(self, fault: Fault) -> None:
        self.broker.freeze()
        time.sleep(fault.seconds)
        self.broker.thaw()

    def _cut(self, fault: Fault) -> None:
        _cut(self.broker_link, fault)

    def _drop(self, fault: Fault) -> None:
        self.broker_link.drop()

    def _black_hole(self, fault: Fault) -> None:
        _black_hole(self.broker_link, fault)

    def _start(self, server: Any, within: float = 20) -> None:
        """Start a server that was stopped in a hurry: what is left of it may be in the way for a moment."""
        deadline = time.monotonic() + within
        while True:
            try:
                # NOTE: The kernel kills a server with the *thread* that started it.
                self._starter.submit(server.start).result()
                return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _note_loss(self) -> None:
        self.losses.append(int(time.time() * 1000))

    # The database

    def _lock(self, fault: Fault) -> None:
        assert isinstance(self.database, Path)
        with contextlib.closing(sqlite3.connect(self.database, timeout=30, isolation_level=None)) as outsider:
            outsider.execute("BEGIN EXCLUSIVE")
            time.sleep(fault.seconds)
            outsider.execute("ROLLBACK")

    def _stall_database(self, fault: Fault) -> None:
        stopped = _family(self._server().process.pid)
        for pid in stopped:
            _signal(pid, signal.SIGSTOP)
        time.sleep(fault.seconds)
        for pid in stopped:
            _signal(pid, signal.SIGCONT)

    def _restart_database(self, fault: Fault) -> None:
        server = self._server()
        server.stop(signal.SIGINT if fault.detail == "fast" else signal.SIGQUIT)
        time.sleep(fault.seconds)
        self._start(server)

    def _end_connections(self, fault: Fault) -> None:
        with self._server().connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dramatiq-durable'"
            )

    def _lock_rows(self, fault: Fault) -> str:
        """As somebody does who forgets to commit, in a database tool."""
        chosen = "state = 'active'" if fault.detail == "active" else "finished_at IS NULL"
        with self._server().connect(self.name) as connection, connection.transaction():
            locked = connection.execute(f"SELECT id FROM durable_jobs WHERE {chosen} ORDER BY id FOR UPDATE").fetchall()
            time.sleep(fault.seconds)
        return f"{len(locked)} rows"

    def _cut_database(self, fault: Fault) -> None:
        _cut(self._link(), fault)

    def _drop_database(self, fault: Fault) -> None:
        self._link().drop()

    def _black_hole_database(self, fault: Fault) -> None:
        _black_hole(self._link(), fault)

    def _server(self) -> Any:
        assert isinstance(self.database, Postgres)
        return self.database

    def _link(self) -> Links:
        assert self.database_link is not None
        return self.database_link


def _slot(fault: Fault) -> int:
    return int(fault.target.rpartition("-")[2])


def _cut(link: Any, fault: Fault) -> None:
    link.cut()
    time.sleep(fault.seconds)
    link.restore()


def _black_hole(link: Any, fault: Fault) -> None:
    link.swallow(*(() if fault.detail == "both" else (fault.detail,)))
    time.sleep(fault.seconds)
    link.restore()


def _family(pid: int) -> list[int]:
    """Return *pid* and its children: every connection of PostgreSQL is a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
