"""The network under torture: every worker command has a proxy of its own to each server, and so has the producer."""

from __future__ import annotations

from tests.harness.proxy import Proxy

__all__ = ["Links"]


class Links:
    """The ways to one server.

    Parameters:
      port(int): The server's.
      count(int): How many there are.
    """

    def __init__(self, port: int, count: int) -> None:
        self.each = [Proxy(port) for _ in range(count)]

    def cut(self) -> None:
        for link in self.each:
            link.cut()

    def drop(self) -> None:
        for link in self.each:
            link.drop()

    def swallow(self, *directions: str) -> None:
        for link in self.each:
            link.swallow(*directions)

    def restore(self) -> None:
        for link in self.each:
            link.restore()

    def close(self) -> None:
        for link in self.each:
            link.close()
