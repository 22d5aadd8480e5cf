"""Real worker processes under the ``dramatiq`` command, and a small supervisor that starts them again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ..redact import redact_text
from .journal import Reader

__all__ = ["Fleet", "Worker"]

#: How long worker processes get to stop by themselves (seconds).
GRACE = 8.0


class Worker:
    """One ``dramatiq`` command with one worker process under it.

    Parameters:
      launch(str): Its name in the journal.
      master(Popen): The command.
    """

    def __init__(self, launch: str, master: subprocess.Popen[bytes]) -> None:
        self.launch = launch
        self.master = master
        #: The process that runs jobs; known once it has booted.
        self.pid: int | None = None
        self.dead = False


class Fleet:
    """A number of worker processes, started again whenever they are gone.

    Parameters:
      size(int): How many.
      threads(int): How many jobs each runs at a time.
      room(Path): Where they work and write their logs.
      env(dict): Their environment.
      reader(Reader): The journal.

    Attributes:
      deaths(dict): When each dead process died (monotonic), by its process id.
      kills(int): How many were killed.
    """

    def __init__(self, size: int, threads: int, room: Path, env: dict[str, str], reader: Reader) -> None:
        self._threads = threads
        self._room = room
        self._env = env
        self._reader = reader
        self._launches = 0
        self.deaths: dict[int, float] = {}
        self.kills = 0
        self.workers = [self._launch() for _ in range(size)]

    def _launch(self) -> Worker:
        self._launches += 1
        launch = str(self._launches)
        command = [sys.executable, "-m", "dramatiq", "dramatiq_durable.demo.app"]
        command += ["--processes", "1", "--threads", str(self._threads), "--worker-shutdown-timeout", "5000"]
        with open(self._room / f"worker-{launch}.log", "wb") as log:
            master = subprocess.Popen(  # noqa: S603
                command,
                cwd=self._room,
                env={**self._env, "DURABLE_DEMO_LAUNCH": launch},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C is for the demo, which stops them in good order.
                start_new_session=True,
            )
        return Worker(launch, master)

    def tend(self) -> list[Worker]:
        """Look after all of them; return those that were started again."""
        fresh = []
        for index, worker in enumerate(self.workers):
            worker.pid = self._reader.boots.get(worker.launch)
            if worker.master.poll() is not None:
                self._note_death(worker)
                self._end(worker)
                self.workers[index] = self._launch()
                fresh.append(self.workers[index])
        return fresh

    def booted(self) -> list[Worker]:
        """Those that are ready to work."""
        return [worker for worker in self.workers if worker.pid is not None and not worker.dead]

    def kill(self, worker: Worker) -> None:
        """SIGKILL the process that runs jobs: nothing in it gets another instruction."""
        if worker.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        self.kills += 1
        deadline = time.monotonic() + 5
        while _alive(worker.pid) and time.monotonic() < deadline:
            time.sleep(0.002)
        self._note_death(worker)

    def _note_death(self, worker: Worker) -> None:
        worker.dead = True
        if worker.pid is not None:
            self.deaths.setdefault(worker.pid, time.monotonic())

    def last_words(self) -> str:
        """The end of the newest log, with secrets hidden."""
        log = self._room / f"worker-{self._launches}.log"
        return redact_text(log.read_text(errors="replace")[-2_000:])

    def stop(self) -> None:
        """Stop all as a deployment does, and kill what is left after a while."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.master.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.master.wait(max(0.0, deadline - time.monotonic()))
        self.close()

    def close(self) -> None:
        """Kill all at once."""
        for worker in self.workers:
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.master.pid, signal.SIGKILL)
        worker.master.wait()


def _alive(pid: int) -> bool:
    """Whether a process can still do anything: a zombie cannot."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (OSError, IndexError):
        # No /proc here (macOS): the command that started it reaps it, and then it is gone.
        return not Path("/proc/self").exists()
