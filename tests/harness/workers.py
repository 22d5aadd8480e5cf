"""Real worker processes under the ``dramatiq`` command, and what a test does to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.servers import die_with_parent, wait_until

__all__ = ["Fleet", "WorkerProcess"]

#: Short leases, so that a takeover takes seconds.
SETTINGS = {
    "LEASE": "2400",
    "HEARTBEAT_INTERVAL": "400",
    "RECONCILE_INTERVAL": "800",
    "PUBLISH_GRACE": "800",
    "SCHEDULER_INTERVAL": "200",
    "SHUTDOWN_TIMEOUT": "2000",
}

GEVENT = "from gevent import monkey; monkey.patch_all(); import sys; from dramatiq.cli import main; sys.exit(main())"


class WorkerProcess:
    """One ``dramatiq`` command.

    Parameters:
      env(dict): Its environment.
      room(Path): Where its output goes.
      threads(int): How many jobs each process runs at a time.
      processes(int): How many worker processes it has.
      modules(Sequence[str]): What it loads; the first has the broker.
      options(Sequence[str]): More of the command's options.
      gevent(bool): Whether it is ``dramatiq-gevent``.
      program(str): A program of :mod:`tests.harness.programs` to run instead of the command.
    """

    def __init__(
        self,
        env: dict[str, str],
        room: Path,
        *,
        threads: int = 4,
        processes: int = 1,
        modules: Sequence[str] = ("tests.harness.app",),
        options: Sequence[str] = (),
        gevent: bool = False,
        program: str | None = None,
    ) -> None:
        self.processes = processes
        self.log = room / f"worker-{time.monotonic_ns()}.log"
        # What the script ``dramatiq-gevent`` does.
        begin = ["-c", GEVENT] if gevent else ["-m", "dramatiq"]
        command = [sys.executable, *begin, *modules, "-p", str(processes), "-t", str(threads)]
        command += ["--worker-shutdown-timeout", "20000", *options]
        if program is not None:
            command = [sys.executable, "-m", "tests.harness.programs", program, *options]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> WorkerProcess:
        ready = "Worker process is ready for action"
        wait_until(lambda: self.text().count(ready) >= self.processes or self.dead(), 30, "the worker is ready")
        assert not self.dead(), self.text()[-3000:]
        return self

    def dead(self) -> bool:
        return self.process.poll() is not None

    def children(self) -> list[int]:
        """Return the process ids of the master's children, the worker process among them."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of it at once, as an out-of-memory killer or a lost machine does."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """SIGTERM to the master, as a deployment does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)

    def freeze(self) -> None:
        """Stop every thread of it; they have stopped when this returns."""
        pids = [self.process.pid, *self.children()]
        self.signal_all(signal.SIGSTOP)
        wait_until(lambda: all(map(_is_stopped, pids)), 30, "all of the worker has stopped")

    def thaw(self) -> None:
        self.signal_all(signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process stand still, or it is gone."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False
    return all(state in "TtZX" for state in states)


class Fleet:
    """The worker processes of one test.

    Parameters:
      room(Path): The test's directory: journal, gates, logs.
      database_url(str)
      redis_url(str)
    """

    def __init__(self, room: Path, database_url: str, redis_url: str) -> None:
        self.room = room
        self.workers: list[WorkerProcess] = []
        self.deaths: dict[int, float] = {}
        self.env = {
            **os.environ,
            "DURABLE_TEST_ROOM": str(room),
            "DURABLE_TEST_REDIS": redis_url,
            "DRAMATIQ_DURABLE_DATABASE_URL": database_url,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **{f"DRAMATIQ_DURABLE_{name}": value for name, value in SETTINGS.items()},
        }

    def start(
        self, *, ready: bool = True, how: dict[str, Any] | None = None, processes: int = 1, threads: int = 4, **env: str
    ) -> WorkerProcess:
        """Start a ``dramatiq`` command.

        Parameters:
          ready(bool): Whether to wait until it works.
          how(dict): More parameters of :class:`WorkerProcess`.
          processes(int): How many worker processes it has.
          threads(int): How many jobs each process runs at a time.
          **env: More of its environment.
        """
        worker = WorkerProcess({**self.env, **env}, self.room, processes=processes, threads=threads, **(how or {}))
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    def run(self, program: str, *options: str) -> WorkerProcess:
        """Start a program of :mod:`tests.harness.programs`."""
        return self.start(ready=False, how={"program": program, "options": options})

    def kill(self, worker: WorkerProcess) -> None:
        """Kill *worker* and remember when its processes died."""
        pids = [worker.process.pid, *worker.children()]
        worker.kill()
        self.deaths.update(dict.fromkeys(pids, time.monotonic()))

    def signal_process(self, pid: int, number: int) -> None:
        """Send a signal to one worker process; remember when it died of it."""
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.deaths[pid] = time.monotonic()

    def touch(self, name: str) -> None:
        (self.room / name).touch()

    def remove(self, name: str) -> None:
        (self.room / name).unlink(missing_ok=True)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()

    def logs(self) -> str:
        return "\n".join(f"--- {worker.log.name}\n{worker.text()[-6000:]}" for worker in self.workers)
