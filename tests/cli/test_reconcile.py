from __future__ import annotations

import time
from pathlib import Path

import pytest

from dramatiq_durable.store import jobs, migrate, reading
from dramatiq_durable.store.database import connect
from dramatiq_durable.store.types import NewJob
from tests.cli.conftest import Command
from tests.servers import Valkey, wait_until

APP = """
import os
import dramatiq, dramatiq_durable
from dramatiq.brokers.redis import RedisBroker

print("An app may print whatever it likes.")
broker = RedisBroker(url=os.environ["TEST_REDIS"])
if "PLAIN" not in os.environ:
    dramatiq_durable.install(broker, publish_grace=1)
dramatiq.set_broker(broker)

@dramatiq.actor
def research(topic): ...
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "my_app.py").write_text(APP)
    return "my_app"


def lose(url: str, number: int) -> list[str]:
    """Record jobs as if they had been published; the broker knows none of them."""
    db = connect(url)
    migrate.upgrade(db)
    ids = [f"job-{i}" for i in range(number)]
    for id in ids:
        job = NewJob(id=id, queue="default", actor="research", agent="research", payload=b"{}", broker_ref=f"{id}.1")
        assert jobs.record(db, job) == "recorded"
    wait_until(lambda: reading.now(db) > max(row.published_at or 0 for row in reading.list_jobs(db)) + 5)
    db.close_all()
    return ids


def test_jobs_that_the_broker_lost_are_put_back(command: Command, app: str, url: str, valkey: Valkey) -> None:
    # Given queued jobs that the broker has never heard of
    ids = lose(url, 3)
    environment = {"TEST_REDIS": valkey.url}

    # When somebody reconciles, twice
    options = ("reconcile", app, "--path", "room", "--database-url", url)
    first = command(*options, "--json", env=environment)
    second = command(*options, env=environment)

    # Then all are to be published again, and the second time there is nothing to do
    assert (first.code, first.json()) == (0, {"looked": 3, "put_back": 3, "database": url})
    assert (second.code, second.out) == (0, "0 waiting jobs compared with the broker, 0 put back.\n")
    db = connect(url)
    rows = [reading.get_job(db, id) for id in ids]
    assert all(row is not None and row.publish_at is not None and row.put_back == 1 for row in rows)
    assert (last := reading.last_pass(db, "reconcile")) is not None and last.put_back_total == 3
    db.close_all()


def test_a_broker_that_is_away_is_a_sentence(command: Command, app: str, url: str) -> None:
    lose(url, 1)
    began = time.monotonic()

    environment = {"TEST_REDIS": "redis://:hunter2@127.0.0.1:1/0"}
    answer = command("reconcile", app, "-p", "room", "--database-url", url, "--json", env=environment)

    assert (answer.code, answer.out) == (2, "")
    assert "the broker did not answer" in answer.err
    assert "Traceback" not in answer.err and "hunter2" not in answer.err
    assert time.monotonic() - began < 30


def test_an_app_that_cannot_be_used_is_a_sentence(command: Command, app: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "room" / "broken.py").write_text("password = 'hunter2'\nraise ValueError(f'{password=}')")
    environment = {"TEST_REDIS": "redis://127.0.0.1:1/0"}
    for name, env, sentence in (
        ("nowhere", {}, "'nowhere' could not be imported: No module named 'nowhere'."),
        ("my_app:nothing", {}, "does not define a 'nothing' variable."),
        ("broken", {}, "ValueError: password='***'"),
        ("my_app", {"PLAIN": "1"}, "is not equipped"),
        ("my_app", {"DRAMATIQ_DURABLE_LEASE": "x"}, "lease must be a whole number"),
    ):
        answer = command("reconcile", name, "-p", "room", env={**environment, **env})

        assert (answer.code, answer.out) == (2, "")
        assert sentence in answer.err and "hunter2" not in answer.err


def test_an_app_that_names_its_own_database_is_not_overruled(command: Command, url: str, tmp_path: Path) -> None:
    own = APP.replace("publish_grace=1", "database_url='sqlite:///own.sqlite3'")
    (tmp_path / "my_app.py").write_text(own)

    answer = command("reconcile", "my_app", "--database-url", url, env={"TEST_REDIS": "redis://127.0.0.1:1/0"})

    assert answer.code == 2
    assert "names its own database, sqlite:///own.sqlite3" in answer.err
