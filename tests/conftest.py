"""Fixtures for every test: real servers, a fresh database each, and the way to wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Postgres, Valkey


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the session."""
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def _valkey() -> Iterator[Valkey]:
    server = Valkey()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def valkey(_valkey: Valkey) -> Valkey:
    """A Valkey server, empty."""
    _valkey.flush()
    return _valkey


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/record.sqlite3"
    # A server of one's own may be named instead; its database is then used as it is and emptied.
    given = os.environ.get("DURABLE_TEST_POSTGRES_URL")
    if given:
        return _emptied(given)
    server: Postgres = request.getfixturevalue("postgres")
    return server.create()


def _emptied(url: str) -> str:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return url
