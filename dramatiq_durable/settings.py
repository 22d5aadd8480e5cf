"""Settings: from keyword arguments, the environment, or a ``.env`` file, in this order.

Heavy to import (pydantic), so only the edges of the package do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from dramatiq.logging import get_logger
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from .errors import InvalidSettings
from .redact import redact_text, safe_url

__all__ = ["PREFIX", "Settings"]

#: What the names of environment variables begin with.
PREFIX = "DRAMATIQ_DURABLE_"

#: The most that any time or size may be: it fits every column and every timeout (as milliseconds, 24 days).
MOST = 2**31 - 1


def _number(default: int, description: str, *, unit: str = "", most: int = MOST) -> Any:
    shown = f"{description} (In {unit}.)" if unit else description
    return Field(default, ge=1, le=most, description=shown, json_schema_extra={"unit": unit})


def _time(default: int, description: str, *, most: int = MOST) -> Any:
    return _number(default, description, unit="milliseconds", most=most)


class Settings(BaseSettings):
    """How the package behaves.  Times are in milliseconds, sizes in bytes.

    Every setting can be given as a keyword argument, as an environment variable (``DRAMATIQ_DURABLE_LEASE=30000``), or
    as such a line in a file ``.env`` in the working directory; the first that is there wins.

    Raises:
      InvalidSettings: If a value makes no sense, or two contradict each other; one sentence for each problem.

    Example:
      >>> Settings(lease=30_000, heartbeat_interval=5_000).lease
      30000
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        # A .env file is shared with others.
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    database_url: str = Field(
        "sqlite:///dramatiq-durable.sqlite3",
        description="Where the record of all jobs is kept: sqlite:///path or postgresql://user:password@host/name.",
    )
    lease: int = _time(
        60_000,
        "For how long a worker is believed alive after its last heartbeat; the job of a worker that died starts again "
        "this much later.",
    )
    heartbeat_interval: int = _time(10_000, "How often a worker renews its leases; at most a third of the lease.")
    reconcile_interval: int = _time(60_000, "How often the rows are compared with the broker.")
    scheduler_interval: int = _time(
        500, "The longest that the scheduler sleeps between two looks for jobs that are due; at most 1,000.", most=1_000
    )
    publish_grace: int = _time(
        5_000, "A queued job that was published longer ago than this is looked for in the broker."
    )
    max_lost: int = _number(3, "How often a job may be running when its worker dies before it fails for good.")
    max_interruptions: int = _number(20, "How often a job may be interrupted by a stopping worker before it fails.")
    max_payload: int = _number(65_536, "The largest encoded message that is accepted.", unit="bytes")
    on_publish_error: Literal["warn", "raise"] = Field(
        "warn",
        description="What send() does when a job is recorded but the broker is away: warn and return, or raise. "
        "The job will be published either way.",
    )
    commit_batch: int = _number(100, "How many outcomes are committed together, at most.")
    pool_size: int = _number(10, "How many connections to a database server a process opens, at most.")
    shutdown_timeout: int = _time(5_000, "For how long a stopping worker waits for the database.")
    profile: Literal["development", "production"] = Field(
        "development",
        description="In production nothing is created by itself: not the tables of an embedded database either.",
    )
    adopt: bool = Field(
        True,
        description="Whether a message that was sent by a process without dramatiq-durable is recorded and run; "
        "otherwise it is parked.",
    )

    def __init__(self, **values: Any) -> None:
        unknown = [name for name in values if name not in type(self).model_fields and not name.startswith("_")]
        if unknown:
            raise InvalidSettings(" ".join(f"There is no setting {name!r}.{_meant(name)}" for name in unknown))
        try:
            super().__init__(**values)
        except ValidationError as e:
            raise InvalidSettings(" ".join(_sentences(e, values))) from None
        except SettingsError as e:
            raise InvalidSettings(f"The settings could not be read: {redact_text(str(e))}.") from None
        except (OSError, UnicodeDecodeError) as e:
            raise InvalidSettings(f"The file .env could not be read: {e}.") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        for source in (env_settings, dotenv_settings):
            _warn_of_unknown(getattr(source, "env_vars", {}))
        return init_settings, env_settings, dotenv_settings

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        problems = []
        if not self.database_url.strip():
            problems.append("database_url must not be empty.")
        if 3 * self.heartbeat_interval > self.lease:
            problems.append(
                f"heartbeat_interval ({self.heartbeat_interval}) must be at most a third of lease ({self.lease}), "
                "or two late heartbeats cost a living worker its jobs: set heartbeat_interval to "
                f"{self.lease // 3} or less, or lease to {3 * self.heartbeat_interval} or more."
            )
        if problems:
            raise ValueError(" ".join(problems))
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, safe_url(value) if name == "database_url" else value


def _meant(name: str) -> str:
    """A question that names the setting closest to *name*, or nothing."""
    close = difflib.get_close_matches(name.lower(), Settings.model_fields, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _sentences(error: ValidationError, given: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each problem, in our words, without the database's URL."""
    for problem in error.errors(include_url=False):
        context = problem.get("ctx", {})
        if not problem["loc"]:
            yield str(context.get("error", problem["msg"]))
            continue
        name = str(problem["loc"][0])
        unit = (Settings.model_fields[name].json_schema_extra or {}).get("unit", "")  # type: ignore[union-attr]
        of_unit = f" of {unit}" if unit else ""
        match problem["type"]:
            case "greater_than_equal":
                must = f"at least {context['ge']}"
            case "less_than_equal":
                must = f"at most {context['le']:,}"
            case "literal_error":
                must = str(context["expected"])
            case kind if kind.startswith("bool"):
                must = "true or false"
            case kind if kind.startswith("int"):
                must = f"a whole number{of_unit}"
            case kind if kind.startswith("string"):
                must = "text"
            case _:
                must = f"something else ({problem['msg'].lower()})"
        shown = "" if name == "database_url" else f", not {redact_text(repr(problem['input']))[:60]}"
        source = "" if name in given else f" It is set by {PREFIX}{name.upper()}, in the environment or in .env."
        yield f"{name} must be {must}{shown}.{source}"


def _warn_of_unknown(variables: Mapping[str, Any]) -> None:
    """A misspelt variable is not refused, as a newer release may know it; but it is no secret either."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in sorted({variable.upper() for variable in variables} - known):
        if name.startswith(PREFIX):
            meant = _meant(name.removeprefix(PREFIX))
            get_logger(__name__).warning("%s is not a setting and has no effect.%s", name, meant)
