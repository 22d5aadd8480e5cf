from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dramatiq_durable.errors import InvalidSettings
from dramatiq_durable.settings import PREFIX, Settings


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)


def test_a_keyword_wins_over_the_environment_over_the_file_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a value in each place, one less every time
    Path(".env").write_text(
        "DRAMATIQ_DURABLE_LEASE=101000\nDRAMATIQ_DURABLE_MAX_LOST=102\nDRAMATIQ_DURABLE_POOL_SIZE=7\nX=1\n"
    )
    monkeypatch.setenv("DRAMATIQ_DURABLE_LEASE", "201000")
    monkeypatch.setenv("DRAMATIQ_DURABLE_MAX_LOST", "202")

    # When they are read
    settings = Settings(lease=301_000)

    # Then each comes from the first place that has it
    assert (settings.lease, settings.max_lost, settings.pool_size) == (301_000, 202, 7)
    assert settings.max_interruptions == 20


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAMATIQ_DURABLE_LEASE", "")
    assert Settings().lease == 60_000


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"leese": 3}, "There is no setting 'leese'. Did you mean 'lease'?"),
        ({"zzz": 3}, "There is no setting 'zzz'."),
        ({"lease": 0}, "lease must be at least 1, not 0."),
        ({"lease": "60s"}, "lease must be a whole number of milliseconds, not '60s'."),
        ({"lease": 1.5}, "lease must be a whole number of milliseconds, not 1.5."),
        ({"lease": None}, "lease must be a whole number of milliseconds, not None."),
        ({"lease": 10**12}, "lease must be at most 2,147,483,647, not 1000000000000."),
        ({"max_payload": "64kB"}, "max_payload must be a whole number of bytes, not '64kB'."),
        ({"pool_size": -1}, "pool_size must be at least 1, not -1."),
        ({"scheduler_interval": 2_000}, "scheduler_interval must be at most 1,000, not 2000."),
        ({"on_publish_error": "ignore"}, "on_publish_error must be 'warn' or 'raise', not 'ignore'."),
        ({"profile": "prod"}, "profile must be 'development' or 'production', not 'prod'."),
        ({"adopt": "perhaps"}, "adopt must be true or false, not 'perhaps'."),
        ({"database_url": " "}, "database_url must not be empty."),
        (
            {"lease": 20_000},
            "heartbeat_interval (10000) must be at most a third of lease (20000), or two late heartbeats cost a living "
            "worker its jobs: set heartbeat_interval to 6666 or less, or lease to 30000 or more.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        Settings(**values)
    assert str(caught.value) == f"[DD105] {sentence}"


def test_each_problem_gets_its_sentence_and_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given one wrong value in the environment and one among the keywords
    monkeypatch.setenv("DRAMATIQ_DURABLE_LEASE", "x")

    # When they are read
    with pytest.raises(InvalidSettings) as caught:
        Settings(max_lost="y")

    # Then both are told, and where the first one comes from
    assert "lease must be a whole number of milliseconds, not 'x'." in str(caught.value)
    assert "It is set by DRAMATIQ_DURABLE_LEASE, in the environment or in .env." in str(caught.value)
    assert "max_lost must be a whole number, not 'y'." in str(caught.value)


def test_the_password_of_the_database_is_never_shown() -> None:
    settings = Settings(database_url="postgresql://app:hunter2@db/jobs")

    assert settings.database_url == "postgresql://app:hunter2@db/jobs"
    assert "hunter2" not in repr(settings) + str(settings) + f"{settings!r}"
    assert "postgresql://***@db/jobs" in repr(settings)
    for wrong in ({"database_url": ["postgresql://app:hunter2@db"]}, {"lease": "postgresql://app:hunter2@db"}):
        with pytest.raises(InvalidSettings) as caught:
            Settings(**wrong)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_misspelt_variable_is_told_about(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Path(".env").write_text("DRAMATIQ_DURABLE_POOLSIZE=5\nOTHER=1\n")
    monkeypatch.setenv("DRAMATIQ_DURABLE_LEESE", "5")

    with caplog.at_level(logging.WARNING):
        Settings()

    assert sorted(record.getMessage() for record in caplog.records) == [
        "DRAMATIQ_DURABLE_LEESE is not a setting and has no effect. Did you mean 'lease'?",
        "DRAMATIQ_DURABLE_POOLSIZE is not a setting and has no effect. Did you mean 'pool_size'?",
    ]


def test_a_file_that_cannot_be_read_is_told_about() -> None:
    Path(".env").write_bytes(b"DRAMATIQ_DURABLE_LEASE=\xff\xfe\n")

    with pytest.raises(InvalidSettings, match=r"\.env could not be read"):
        Settings()


def test_settings_can_be_made_from_settings() -> None:
    # Given settings, as install(broker, settings=..., lease=...) combines them with keywords
    settings = Settings(max_lost=5)

    assert Settings(**{**settings.model_dump(), "lease": 90_000}).max_lost == 5


def test_every_setting_is_described_with_its_unit() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description and field.description.rstrip(")").endswith("."), name
        if name.endswith(("interval", "delay", "grace", "timeout", "lease")):
            assert "milliseconds" in field.description, name


def test_importing_the_package_imports_no_settings() -> None:
    code = (
        "import sys, dramatiq_durable; print([m for m in sys.modules if m in ('pydantic', 'typer', 'rich', 'peewee')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
