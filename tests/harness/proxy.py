"""A TCP proxy that a test can cut, or have swallow bytes in one direction: a network that breaks."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

__all__ = ["Proxy"]


class Proxy:
    """Forwards connections to a server of this machine.

    Parameters:
      target(int): The server's port.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open = threading.Event()
        self._open.set()
        self._swallow = {"requests": False, "replies": False}
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._closed = False
        #: Bytes swallowed in each direction.
        self.swallowed = {"requests": 0, "replies": 0}
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Break all connections; refuse new ones."""
        self._open.clear()
        self.drop()

    def drop(self) -> None:
        """Break all connections that are there now."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def swallow(self, *directions: str) -> None:
        """Let ``"requests"`` or ``"replies"`` (or both) vanish; connections stay open."""
        for direction in directions or ("requests", "replies"):
            self._swallow[direction] = True

    def restore(self) -> None:
        """Work again.  Connections that have lost bytes are broken: they could never recover."""
        if any(self._swallow.values()):
            self.drop()
        self._swallow = {"requests": False, "replies": False}
        self._open.set()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._open.is_set():
                # A reset at once, as from a machine without the server.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        if not self._open.is_set():
            self.drop()
        try:
            self._pump(client, server)
        finally:
            with self._lock:
                self._pairs.discard(pair)
            client.close()
            server.close()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        others = {client: (server, "requests"), server: (client, "replies")}
        while True:
            readable, _, _ = select.select([client, server], [], [])
            for end in readable:
                other, direction = others[end]
                try:
                    data = end.recv(65536)
                    if not data:
                        return
                    if self._swallow[direction]:
                        self.swallowed[direction] += len(data)
                    else:
                        other.sendall(data)
                except OSError:
                    return
