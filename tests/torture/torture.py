"""One torture, from the empty servers to the verdict."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dramatiq_durable.store import migrate
from dramatiq_durable.store.database import connect
from tests.harness.journal import Journal
from tests.servers import Postgres, Valkey, die_with_parent
from tests.torture import checks, plan
from tests.torture.faults import Faults
from tests.torture.fleet import SETTINGS, TorturedFleet
from tests.torture.links import Links

__all__ = ["Verdict", "torture"]

#: Within how many seconds after the last fault every job must be final or held.
BOUND = 60.0


class Verdict(NamedTuple):
    """What came of it.

    Parameters:
      seed(int), seconds(float), database(str): What was asked for.
      violations(dict): What each check found.
      figures(dict): What happened, in numbers.
      log(list[str]): The faults, with their times.
      room(Path): The journal and the workers' logs.
    """

    seed: int
    seconds: float
    database: str
    violations: dict[str, list[str]]
    figures: dict[str, Any]
    log: list[str]
    room: Path

    @property
    def good(self) -> bool:
        return not any(self.violations.values())

    def text(self) -> str:
        """Return the verdict as a person reads it."""
        lines = [f"seed {self.seed}, {self.seconds:.0f} s, {self.database}", "", "Faults:"]
        lines += [f"  {line}" for line in self.log]
        lines += ["", "What happened:"]
        lines += [f"  {name:38} {value}" for name, value in self.figures.items()]
        lines += ["", "What may not happen:"]
        lines += [f"  {name:38} {len(found)}" for name, found in self.violations.items()]
        for name, found in self.violations.items():
            lines += [f"\n{name}:", *(f"  {line}" for line in found[:8])] if found else []
        lines += ["", f"{'GOOD' if self.good else 'BROKEN'}: seed {self.seed}, {self.database}, room {self.room}"]
        return "\n".join(lines)


def torture(seed: int, seconds: float, database: str, room: Path, postgres: Postgres | None = None) -> Verdict:
    """Torture a fleet for *seconds* and judge it.

    Parameters:
      seed(int): The same jobs and the same faults at the same times for the same seed.
      seconds(float): How long faults are made.
      database(str): ``"sqlite"`` or ``"postgresql"``.
      room(Path): An empty directory.
      postgres(Postgres): A server of the caller's for this alone; one is made if it is needed and not given.
    """
    if database == "sqlite":
        postgres = None
    with contextlib.ExitStack() as stack:
        broker = Valkey(persist=True)
        stack.callback(broker.close)
        broker.start()
        broker_link = Links(broker.port, plan.SLOTS + 1)
        stack.callback(broker_link.close)
        database_link: Links | None = None
        direct = f"sqlite:///{room}/record.sqlite3"
        if database == "postgresql":
            if postgres is None:
                postgres = Postgres()
                stack.callback(postgres.close)
                postgres.start()
            direct = postgres.create()
            database_link = Links(postgres.port, plan.SLOTS + 1)
            stack.callback(database_link.close)
        db = connect(direct)
        migrate.upgrade(db)
        db.close_all()
        *envs, env = [_environment(room, direct, broker_link, database_link, i) for i in range(plan.SLOTS + 1)]
        rng = random.Random(f"fleet {seed}")
        fleet = TorturedFleet(room, envs, [rng.randint(2, 4) for _ in range(plan.SLOTS)])
        stack.callback(fleet.close)
        faults = Faults(
            fleet, broker, broker_link, postgres or room / "record.sqlite3", database_link, direct.rpartition("/")[2]
        )
        producer = _produce(seed, seconds, env, room, broker.port)
        stack.callback(producer.kill)
        faults.run(plan.faults(seed, seconds, database))
        try:
            producer.wait(60)
        except subprocess.TimeoutExpired:
            faults.errors.append("the producer did not come to an end")
        settled = _settle(direct, broker)
        # Everything is done.  Is everybody still able to work?
        alive = fleet.alive()
        probe = _produce(seed, seconds, env, room, broker.port, "--probe", str(4 * sum(fleet.threads)))
        stack.callback(probe.kill)
        probe.wait(60)
        _settle(direct, broker)
        found = _judge(room, direct, fleet, faults, broker, alive)
        found["broken torture"] = faults.errors + ([] if producer.poll() == 0 else ["the producer failed"])
        log = [f"{at:6.1f}  {what}" for at, what in sorted(faults.log)]
        return Verdict(seed, seconds, database, found, _figures(room, direct, fleet, settled), log, room)


def _environment(room: Path, url: str, broker: Links, database: Links | None, which: int) -> dict[str, str]:
    """Return the environment of a worker command, or of the producer: each has its own way to the servers."""
    if database is not None:
        link = database.each[which]
        url = url.replace(f":{link.target}/", f":{link.port}/")
    return {
        **os.environ,
        "DURABLE_TEST_ROOM": str(room),
        "DURABLE_TEST_REDIS": f"redis://127.0.0.1:{broker.each[which].port}/0",
        "DRAMATIQ_DURABLE_DATABASE_URL": url,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **{f"DRAMATIQ_DURABLE_{name}": value for name, value in SETTINGS.items()},
    }


def _produce(
    seed: int, seconds: float, env: dict[str, str], room: Path, port: int, *more: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.torture.producer", "--seed", str(seed), "--seconds", str(seconds)]
    command += ["--broker-port", str(port), *more]
    with open(room / "producer.log", "ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)


def _settle(url: str, broker: Valkey) -> float:
    """Wait until every job is final or held and the broker is empty, or the bound is reached."""
    began = time.monotonic()
    while time.monotonic() - began < BOUND:
        with contextlib.suppress(Exception):
            states = Counter(row["state"] for row in rows(url, "jobs"))
            pending = any(row["stored_at"] is None for row in rows(url, "results"))
            if states.keys() <= checks.SETTLED and not pending and not leftovers(broker):
                break
        time.sleep(0.5)
    return time.monotonic() - began


def _judge(
    room: Path, url: str, fleet: TorturedFleet, faults: Faults, broker: Valkey, alive: dict[int, int]
) -> dict[str, list[str]]:
    results = rows(url, "results")
    with broker.client() as client:
        stored = {row["key"]: bool(client.exists(row["key"])) for row in results}
    evidence = checks.Evidence(
        events=Journal(room / "journal").events(),
        jobs={row["id"]: row for row in rows(url, "jobs")},
        attempts=rows(url, "attempts"),
        results=results,
        deaths=dict(fleet.deaths),
        frozen=list(fleet.frozen),
        cut_off=list(fleet.cut_off),
        leftovers=leftovers(broker),
        owners={row["owner"]: row["pid"] for row in rows(url, "workers")},
        threads=alive,
        log=[line for worker in fleet.all for line in worker.text().splitlines()],
        stored=stored,
        loss=max(faults.losses, default=0),
    )
    return checks.violations(evidence)


def rows(url: str, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table, without a line of our own store; payloads are left out."""
    with _connected(url) as connection:
        cursor = connection.execute(f"SELECT * FROM durable_{table}")
        names = [column[0] for column in cursor.description]
        hidden = ("payload", "options", "traceback", "value", "agent", "queue")
        return [{name: value for name, value in zip(names, row, strict=True) if name not in hidden} for row in cursor]


@contextlib.contextmanager
def _connected(url: str) -> Iterator[Any]:
    if url.startswith("sqlite:///"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10)) as connection:
            yield connection
    else:
        import psycopg

        with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
            yield connection


def leftovers(broker: Valkey) -> list[str]:
    """Return what the broker holds although nothing is to be done; dead letters and results may stay."""
    found = []
    with broker.client() as client:
        for key in client.scan_iter("dramatiq:*"):
            name = key.decode()
            if "heartbeats" in name or ".XQ" in name or ":__acks__" not in name and client.type(key) == b"string":
                continue
            kind = client.type(key)
            if kind == b"hash":
                found += [f"{name} has the payload {ref.decode()}" for ref in client.hkeys(key)]
            elif kind == b"list":
                found += [f"{name} has the place of {ref.decode()}" for ref in client.lrange(key, 0, -1)]
            elif kind == b"set":
                found += [f"{name} has {ref.decode()} unacknowledged" for ref in client.smembers(key)]
    return found


def _figures(room: Path, url: str, fleet: TorturedFleet, settled: float) -> dict[str, Any]:
    jobs = rows(url, "jobs")
    events = Counter(event.event for event in Journal(room / "journal").events())
    return {
        "jobs": len(jobs),
        "states": dict(Counter(row["state"] for row in jobs)),
        "runs": events["begin"],
        "runs without an end": events["begin"] - events["end"],
        "sends refused": events["refused"],
        "copies put in": events["copied"],
        "put back into the broker": sum(row["put_back"] for row in jobs),
        "runs lost with their worker": sum(row["lost"] for row in jobs),
        "claims lost with their worker": sum(row["lost_claims"] for row in jobs),
        "interruptions": sum(row["interruptions"] for row in jobs),
        "worker commands started": fleet.started,
        "worker processes that ended": len(fleet.deaths),
        "seconds until all was settled": round(settled, 1),
    }
