"""The world of the acceptance tests."""

from __future__ import annotations

from tests.acceptance.conftest import (
    broker_link,
    broker_server,
    database_link,
    own_valkey,
    world,
)

__all__ = ["broker_link", "broker_server", "database_link", "own_valkey", "world"]
