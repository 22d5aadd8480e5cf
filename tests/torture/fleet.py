"""The workers under torture: always as many as planned, and a memory of who was dead or frozen when."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.harness.workers import WorkerProcess
from tests.servers import die_with_parent, wait_until
from tests.torture.plan import LEASE

__all__ = ["SETTINGS", "TorturedFleet"]

SETTINGS = {
    "LEASE": str(int(LEASE * 1000)),
    "HEARTBEAT_INTERVAL": "500",
    "RECONCILE_INTERVAL": "1000",
    "PUBLISH_GRACE": "1000",
    "SCHEDULER_INTERVAL": "200",
    "SHUTDOWN_TIMEOUT": "2000",
}

#: How often the processes are looked at (seconds).
TICK = 0.04


class TorturedWorker(WorkerProcess):
    """One ``dramatiq`` command with one process, running the application under torture."""

    def __init__(self, env: dict[str, str], room: Path, *, threads: int) -> None:
        self.log = room / f"worker-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "dramatiq", "tests.torture.app", "-p", "1", "-t", str(threads)]
        command += ["--worker-shutdown-timeout", "20000"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )


class TorturedFleet:
    """Some ``dramatiq`` commands, each started again when it is gone.

    Parameters:
      room(Path): Where the journal and the logs go.
      envs(list[dict]): The environment of each worker command.
      threads(list[int]): How many threads each has.

    Attributes:
      deaths(dict): When each process was first seen to be gone (monotonic).
      frozen(list): Each process that was stopped, with the times when it was stopped and continued.
      cut_off(list): The same for each process that could not reach the database although others could.
    """

    def __init__(self, room: Path, envs: list[dict[str, str]], threads: list[int]) -> None:
        self.room = room
        self.envs = envs
        self.threads = threads
        self.deaths: dict[int, float] = {}
        self.frozen: list[tuple[int, float, float]] = []
        self.cut_off: list[tuple[int, float, float]] = []
        self.started = 0
        self.all: list[TorturedWorker] = []
        self._alive: set[int] = set()
        self._orphans: set[int] = set()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self.slots = [self._start(slot) for slot in range(len(threads))]
        self._thread = threading.Thread(target=self._tend, name="tend", daemon=True)
        self._thread.start()

    def _start(self, slot: int) -> TorturedWorker:
        worker = TorturedWorker(self.envs[slot], self.room, threads=self.threads[slot])
        self.all.append(worker)
        self.started += 1
        return worker

    def _tend(self) -> None:
        while not self._stop.wait(TICK):
            with self._lock:
                for slot, worker in enumerate(self.slots):
                    self._alive.update(pid for pid in worker.children() if _is_worker(pid))
                    if worker.dead():
                        self.slots[slot] = self._start(slot)
                self._note_deaths()

    def _note_deaths(self) -> None:
        now = time.monotonic()
        for pid in [pid for pid in self._alive if _gone(pid)]:
            self._alive.discard(pid)
            self._orphans.discard(pid)
            self.deaths[pid] = now

    def processes(self, slot: int) -> list[int]:
        """Return the worker processes of one command; its master is not among them."""
        with self._lock:
            return [pid for pid in self.slots[slot].children() if _is_worker(pid) and not _gone(pid)]

    def alive(self) -> dict[int, int]:
        """Wait until all workers are there; return how many threads each worker process has."""
        wait_until(lambda: all("ready for action" in worker.text() for worker in self.slots), 60, "workers are ready")
        return {pid: self.threads[slot] for slot in range(len(self.slots)) for pid in self.processes(slot)}

    def kill(self, slot: int) -> str:
        """SIGKILL to the worker process: its master takes the others along and ends."""
        worker, found = self.slots[slot], self.processes(slot)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        try:
            worker.process.wait(3)
        except subprocess.TimeoutExpired:
            # A master whose worker dies before it has begun waits for it for half a minute.
            worker.signal_all(signal.SIGKILL)
        return f"pids {found}"

    def kill_master(self, slot: int, seconds: float) -> str:
        """SIGKILL to the master alone: its worker goes on, without anybody who knows of it, and is killed later."""
        with self._lock:
            found = self.processes(slot)
            self._alive.update(found)
            self._orphans.update(found)
            _signal(self.slots[slot].process.pid, signal.SIGKILL)
        time.sleep(seconds)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        return f"orphans {found}"

    def deploy(self, slot: int, patience: float | None = None) -> str:
        """SIGTERM to the master; after *patience* seconds SIGKILL to what is left, as an orchestrator does."""
        worker, found = self.slots[slot], self.processes(slot)
        worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(15 if patience is None else patience)
        if patience is not None:
            for pid in found:
                _signal(pid, signal.SIGKILL)
        return f"pids {found}, master {worker.process.pid} ended with {worker.process.poll()}"

    def freeze(self, slot: int, seconds: float) -> str:
        found = self.processes(slot)
        at = time.monotonic()
        for pid in found:
            _signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in found:
            _signal(pid, signal.SIGCONT)
            self.frozen.append((pid, at, time.monotonic()))
        return f"pids {found}"

    def close(self) -> None:
        """Kill everything that is left."""
        self._stop.set()
        self._thread.join()
        for worker in self.all:
            worker.signal_all(signal.SIGKILL)
        for worker in self.all:
            worker.process.wait()
        for pid in self._alive | self._orphans:
            _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def _is_worker(pid: int) -> bool:
    """Return whether *pid* runs jobs, and is not multiprocessing's resource tracker."""
    try:
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
