"""Fixtures for every test: real servers, a fresh database each, and the way to wait."""

from __future__ import annotations

import os
import uuid
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


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, dropped after the test.

    It is made on the server that ``DURABLE_TEST_POSTGRES_URL`` names (by a user who may create databases), else on one
    that the tests start.
    """
    given = os.environ.get("DURABLE_TEST_POSTGRES_URL")
    if given:
        yield from database_on(given)
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create()
    yield url
    server.drop(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/record.sqlite3"
    url: str = request.getfixturevalue("postgres_url")
    return url


def database_on(url: str) -> Iterator[str]:
    import psycopg

    name = f"durable_test_{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield _with_database(url, name)
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _with_database(url: str, name: str) -> str:
    from urllib.parse import urlsplit, urlunsplit

    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
