"""The servers of the tests: what the other tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Valkey, wait_until

STARTS_SERVERS = """
import sys, time
from tests.servers import Postgres, Valkey

servers = Valkey(), Postgres()
for server in servers:
    server.start()
print(*(server.process.pid for server in servers), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the kernel does not end the children of a killed process"
)
def test_no_server_survives_a_test_run_that_is_killed() -> None:
    # Given a process that has started servers,
    command = [sys.executable, "-c", STARTS_SERVERS]
    run = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 2 and all(map(_alive, pids))
    # When it is killed, so that none of its own clean-up runs,
    run.send_signal(signal.SIGKILL)
    run.wait()
    # Then its servers go with it.
    wait_until(lambda: not any(map(_alive, pids)), 10, "the servers are gone")


@pytest.mark.parametrize("persist", [True, False])
def test_a_server_restarts_on_its_port_with_or_without_its_data(persist: bool) -> None:
    server = Valkey(persist=persist)
    try:
        # Given a server with a key,
        server.start()
        with server.client() as client:
            client.set("key", "value")
        port = server.port
        # When it is killed and started again,
        server.kill()
        server.start()
        # Then the key is there exactly when the server persists.
        with server.client() as client:
            assert (client.get("key") == b"value") is persist
        assert server.port == port
    finally:
        server.close()
    assert not server.directory.exists()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # A killed process whose new parent has not collected it yet is a zombie.
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
