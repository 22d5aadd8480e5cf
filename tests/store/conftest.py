"""A migrated, empty record for each test, once of each kind of database."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dramatiq_durable.store import migrate
from dramatiq_durable.store.database import Database, connect
from dramatiq_durable.store.dialects import Statement
from tests.conftest import database_on
from tests.servers import Postgres

_EMPTY = Statement(
    "empty the tables", "TRUNCATE {jobs}, {attempts}, {results}, {undecodable}, {leaders}, {workers}, {passes}"
)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "migrated.sqlite3"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(request: pytest.FixtureRequest) -> Iterator[str]:
    """One database for all tests of the store: to make one for each takes longer than most of them."""
    given = os.environ.get("DURABLE_TEST_POSTGRES_URL")
    if given:
        for url in database_on(given):
            _migrate(url)
            yield url
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create()
    _migrate(url)
    yield url
    server.drop(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def record_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty record."""
    if request.param == "sqlite":
        path = tmp_path / "record.sqlite3"
        shutil.copy(request.getfixturevalue("migrated_file"), path)
        return f"sqlite:///{path}"
    url: str = request.getfixturevalue("migrated_postgres")
    db = connect(url)
    db.execute(_EMPTY)
    db.close_all()
    return url


@pytest.fixture
def db(record_url: str) -> Iterator[Database]:
    db = connect(record_url)
    yield db
    db.close_all()


@pytest.fixture
def other(record_url: str) -> Iterator[Database]:
    """The same record as another process sees it."""
    other = connect(record_url)
    yield other
    other.close_all()


def _migrate(url: str) -> None:
    db = connect(url)
    migrate.upgrade(db)
    db.close_all()
