"""Set-ups: every subset of the pieces either keeps its promises or refuses, naming what is missing."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

import dramatiq_durable
from dramatiq_durable.errors import (
    AlreadyInstalled,
    InvalidSettings,
    MissingPiece,
    NotInstalled,
    NotRecorded,
    SchemaOutdated,
    WrongOrder,
)
from dramatiq_durable.middleware.base import DurableMiddleware
from dramatiq_durable.middleware.capture import CaptureOutcome
from dramatiq_durable.middleware.reconciler import Reconciler
from dramatiq_durable.middleware.record import DurableRecord
from dramatiq_durable.store import reading
from tests.servers import Postgres, free_port

#: Every piece that a user can stack.  Grows with the package.
PIECES: tuple[type[DurableMiddleware], ...] = (DurableRecord, Reconciler, CaptureOutcome)

SUBSETS = [subset for n in range(1, len(PIECES) + 1) for subset in itertools.permutations(PIECES, n)]


def names(subset: tuple[type[DurableMiddleware], ...]) -> str:
    return "+".join(kind.__name__ for kind in subset)


class Other(Middleware):
    """A middleware of somebody else."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/record.sqlite3"


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    broker = StubBroker()
    yield broker
    if "durable" in broker.__dict__:
        broker.durable.uninstall()
    broker.close()


def start(broker: StubBroker) -> None:
    """Start a worker and stop it again."""
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    worker.stop()


@pytest.mark.parametrize("subset", SUBSETS, ids=names)
def test_pieces_that_are_only_added_refuse_to_send_and_to_start(
    broker: StubBroker, subset: tuple[type[DurableMiddleware], ...]
) -> None:
    """DESIGN 6 and 15: without ``install()`` nothing is half-recorded: nothing is sent, and no worker starts."""
    for kind in subset:
        broker.add_middleware(kind())
    actor = dramatiq.actor(lambda: None, actor_name="anything", broker=broker)
    for refused in (actor.send, lambda: actor.send_with_options(delay=1_000), lambda: start(broker)):
        with pytest.raises(NotInstalled, match=r"install\(broker") as caught:
            refused()
        assert any(kind.__name__ in str(caught.value) for kind in subset)
    assert all(queue.empty() for queue in broker.queues.values())


@pytest.mark.parametrize("subset", SUBSETS, ids=names)
def test_every_choice_of_pieces_works_or_is_refused(
    broker: StubBroker, url: str, subset: tuple[type[DurableMiddleware], ...]
) -> None:
    """DESIGN 6: ``install(middleware=[...])`` works with what it is given, or names what is missing."""
    pieces = [kind() for kind in subset]
    if DurableRecord not in subset:
        with pytest.raises(MissingPiece, match="DurableRecord"):
            dramatiq_durable.install(broker, middleware=pieces, database_url=url)
        assert not [m for m in broker.middleware if isinstance(m, DurableMiddleware)]
        return
    db = dramatiq_durable.install(broker, middleware=pieces, database_url=url).db
    assert [type(m) for m in broker.middleware].count(CaptureOutcome) == 1
    seen: list[int] = []
    actor = dramatiq.actor(seen.append, actor_name="anything", broker=broker)
    actor.send(1)
    assert reading.counts(db) == {"queued": 1}
    if Reconciler not in subset:
        with pytest.raises(MissingPiece, match="Reconciler is missing"):
            start(broker)
        assert seen == []
        return
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    broker.join("default", timeout=30_000)
    worker.stop()
    assert seen == [1]


def test_installing_twice_is_refused(broker: StubBroker, url: str) -> None:
    """H13: nothing is recorded or claimed twice; the first installation goes on working."""
    handle = dramatiq_durable.install(broker, database_url=url)
    before = list(broker.middleware)
    with pytest.raises(AlreadyInstalled, match=r"Call install\(\) once"):
        dramatiq_durable.install(broker, database_url=url)
    assert broker.middleware == before
    dramatiq.actor(lambda: None, actor_name="anything", broker=broker).send()
    assert reading.counts(handle.db) == {"queued": 1}


def test_installing_beside_added_pieces_is_refused(broker: StubBroker, url: str) -> None:
    broker.add_middleware(DurableRecord())
    with pytest.raises(AlreadyInstalled, match="add_middleware"):
        dramatiq_durable.install(broker, database_url=url)


def test_a_piece_given_twice_is_refused(broker: StubBroker, url: str) -> None:
    with pytest.raises(AlreadyInstalled, match="Reconciler is given twice"):
        dramatiq_durable.install(broker, middleware=[DurableRecord(), Reconciler(), Reconciler()], database_url=url)


def test_a_piece_added_a_second_time_afterwards_is_refused(broker: StubBroker, url: str) -> None:
    """H13: Dramatiq itself only warns."""
    dramatiq_durable.install(broker, database_url=url)
    broker.middleware.append(Reconciler())
    actor = dramatiq.actor(lambda: None, actor_name="anything", broker=broker)
    for refused in (actor.send, lambda: start(broker)):
        with pytest.raises((WrongOrder, NotInstalled, AlreadyInstalled)):
            refused()


def test_a_middleware_before_ours_is_refused(broker: StubBroker, url: str) -> None:
    """H12: it would still act on a job whose outcome is decided."""
    dramatiq_durable.install(broker, database_url=url)
    broker.add_middleware(Other(), before=DurableRecord)
    actor = dramatiq.actor(lambda: None, actor_name="anything", broker=broker)
    for refused in (actor.send, lambda: actor.send_with_options(delay=1_000), lambda: start(broker)):
        with pytest.raises(WrongOrder, match="Other stands before DurableRecord"):
            refused()


def test_a_middleware_after_ours_is_refused(broker: StubBroker, url: str) -> None:
    """H12: it would change messages after their row is written."""
    dramatiq_durable.install(broker, database_url=url)
    broker.add_middleware(Other())
    actor = dramatiq.actor(lambda: None, actor_name="anything", broker=broker)
    for refused in (actor.send, lambda: start(broker)):
        with pytest.raises(WrongOrder, match="Other was added after install"):
            refused()


def test_a_middleware_between_ours_is_welcome_later_too(broker: StubBroker, url: str) -> None:
    """The errors above say ``after=DurableRecord``; that works, and a results backend put there is caught as well."""
    handle = dramatiq_durable.install(broker, database_url=url)
    backend = StubBackend()
    broker.add_middleware(Results(backend=backend, store_results=True), after=DurableRecord)
    actor = dramatiq.actor(lambda: 42, actor_name="anything", broker=broker)
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    message = actor.send()
    assert message.get_result(backend=backend, block=True, timeout=30_000) == 42
    broker.join("default", timeout=30_000)
    worker.stop()
    assert reading.counts(handle.db) == {"completed": 1}


def test_a_broker_without_any_other_middleware_works(url: str) -> None:
    """Nothing of Dramatiq's own stack is needed: without Retries, a failure is final."""
    broker = StubBroker(middleware=[])
    handle = dramatiq_durable.install(broker, database_url=url)

    def divide(x: int) -> float:
        return 1 / x

    actor = dramatiq.actor(divide, broker=broker)
    good, bad = actor.send(1), actor.send(0)
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    broker.join("default", timeout=30_000, fail_fast=False)
    worker.stop()
    rows = [reading.get_job(handle.db, message.message_id) for message in (good, bad)]
    assert [row and row.state for row in rows] == ["completed", "failed"]
    handle.uninstall()
    broker.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"on_lost": "retry"}, "on_lost must be one of"),
        ({"max_runtime": 0}, "max_runtime must be a positive number"),
        ({"max_runtime": "long"}, "max_runtime must be a positive number"),
        ({"agent": ""}, "agent must be a name"),
        ({"agent": 7}, "agent must be a name"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_where_the_actor_is_declared(
    broker: StubBroker, url: str, options: dict[str, Any], complaint: str
) -> None:
    dramatiq_durable.install(broker, database_url=url)
    with pytest.raises(InvalidSettings, match=f"'anything'.*{complaint}"):
        dramatiq.actor(lambda: None, actor_name="anything", broker=broker, **options)


def test_old_tables_are_never_changed_behind_the_operators_back(broker: StubBroker, postgres: Postgres) -> None:
    """Issue "store": sends and workers refuse, and say what to run; nothing is created."""
    handle = dramatiq_durable.install(broker, database_url=postgres.create())
    actor = dramatiq.actor(lambda: None, actor_name="anything", broker=broker)
    with pytest.raises(NotRecorded, match="dramatiq-durable migrate"):
        actor.send()
    with pytest.raises(SchemaOutdated, match="dramatiq-durable migrate"):
        start(broker)
    with pytest.raises(SchemaOutdated):
        reading.counts(handle.db)


def test_an_embedded_database_in_production_is_not_created_either(broker: StubBroker, url: str) -> None:
    dramatiq_durable.install(broker, database_url=url, profile="production")
    with pytest.raises(SchemaOutdated, match="dramatiq-durable migrate"):
        start(broker)


@pytest.mark.parametrize(
    ("set_up", "complaint"),
    [
        ("broker.add_middleware(durable.DurableRecord())", "NotInstalled.*install"),
        ("durable.install(broker); broker.add_middleware(Other())", "WrongOrder.*Other was added after install"),
        ("durable.install(broker, middleware=[durable.DurableRecord()])", "MissingPiece.*Reconciler is missing"),
        ("durable.install(broker, profile='production')", "SchemaOutdated.*dramatiq-durable migrate"),
    ],
    ids=["only-added", "wrong-order", "missing-piece", "old-tables"],
)
def test_the_command_exits_and_says_why(tmp_path: Path, url: str, set_up: str, complaint: str) -> None:
    """DESIGN 7: a wrong order or a missing piece is a clear error at start-up, and not a worker that does nothing."""
    (tmp_path / "wrong_app.py").write_text(
        "import dramatiq\n"
        "from dramatiq.brokers.redis import RedisBroker\n"
        "from dramatiq.middleware import Middleware\n"
        "import dramatiq_durable as durable\n"
        "class Other(Middleware): pass\n"
        f"broker = RedisBroker(url='redis://127.0.0.1:{free_port()}/0')\n"
        f"{set_up}\n"
        "dramatiq.set_broker(broker)\n"
    )
    command = [sys.executable, "-m", "dramatiq", "wrong_app", "-p", "1", "-t", "1", "--path", str(tmp_path)]
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "DRAMATIQ_DURABLE_DATABASE_URL": url, "PATH": "/usr/bin:/bin"}
    answer = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert answer.returncode != 0
    assert re.search(complaint, answer.stderr, re.DOTALL), answer.stderr[-3000:]
