"""Every error of this package.

::

    DurableError
    ├── ConfigurationError          DD100  something is set up wrongly; nothing was started
    │   ├── NotInstalled            DD101  a middleware was added without install()
    │   ├── WrongOrder              DD102  a middleware stands where it cannot keep its promises
    │   ├── AlreadyInstalled        DD103  the same broker was equipped twice
    │   ├── MissingPiece            DD104  a middleware needs another one that is not there
    │   └── InvalidSettings         DD105  settings that contradict each other or make no sense
    ├── StoreError                  DD200  the database could not do what was asked
    │   ├── DatabaseUnavailable     DD201  it could not be reached, or refused; trying again may help
    │   ├── SchemaOutdated          DD202  its tables are missing or older than this release
    │   ├── SchemaTooNew            DD203  its tables are too new for this release
    │   ├── DriverMissing           DD204  the Python driver for it is not installed
    │   ├── InvalidDatabaseURL      DD205  the URL cannot be understood
    │   ├── NotPermitted            DD206  the database user lacks a right
    │   └── DatabaseFull            DD207  no space is left, or the database is read-only
    ├── SendError                   DD300  a job could not be accepted as asked
    │   ├── NotRecorded             DD301  no row could be written: nothing was queued
    │   ├── NotEncodable            DD302  the arguments cannot be encoded: nothing was queued
    │   ├── PayloadTooLarge         DD303  the encoded message is over the limit: nothing was queued
    │   ├── NotPublished            DD304  recorded, and will be published when the broker is back
    │   └── StaleRun                DD305  a run that lost its claim tried to send: nothing was queued
    └── JobNotFound                 DD401  no job has this id

    LeaseLost                       DD501  not an Exception: interrupts a run whose job was taken over

Errors that hooks raise also derive from Dramatiq's ``MiddlewareError``: a broker swallows anything else
(``dramatiq/broker.py``, ``emit_before``), and work would go on unrecorded.
"""

from __future__ import annotations

from dramatiq.middleware import Interrupt, MiddlewareError

__all__ = [
    "AlreadyInstalled",
    "ConfigurationError",
    "DatabaseFull",
    "DatabaseUnavailable",
    "DriverMissing",
    "DurableError",
    "InvalidDatabaseURL",
    "InvalidSettings",
    "JobNotFound",
    "LeaseLost",
    "MissingPiece",
    "NotEncodable",
    "NotInstalled",
    "NotPermitted",
    "NotPublished",
    "NotRecorded",
    "PayloadTooLarge",
    "SchemaOutdated",
    "SchemaTooNew",
    "SendError",
    "StaleRun",
    "StoreError",
    "WrongOrder",
]


class DurableError(MiddlewareError):
    """Base class of everything that this package raises.

    Attributes:
      code(str): A stable code, to search the documentation with.
    """

    code = "DD000"

    def __str__(self) -> str:
        return f"[{self.code}] {super().__str__()}"


class ConfigurationError(DurableError):
    """Something is set up wrongly; nothing was started."""

    code = "DD100"


class NotInstalled(ConfigurationError):
    """A middleware was added to a broker that was not equipped with ``install()``."""

    code = "DD101"


class WrongOrder(ConfigurationError):
    """A middleware stands where it cannot keep its promises."""

    code = "DD102"


class AlreadyInstalled(ConfigurationError):
    """The same broker was equipped twice."""

    code = "DD103"


class MissingPiece(ConfigurationError):
    """A middleware needs another one that is not there."""

    code = "DD104"


class InvalidSettings(ConfigurationError):
    """Settings contradict each other or make no sense."""

    code = "DD105"


class StoreError(DurableError):
    """The database could not do what was asked."""

    code = "DD200"


class DatabaseUnavailable(StoreError):
    """The database could not be reached, or refused; trying again may help."""

    code = "DD201"


class SchemaOutdated(StoreError):
    """The tables are missing or older than this release; ``dramatiq-durable migrate`` brings them up to date."""

    code = "DD202"


class SchemaTooNew(StoreError):
    """The tables are too new for this release."""

    code = "DD203"


class DriverMissing(StoreError):
    """The Python driver for this database is not installed."""

    code = "DD204"


class InvalidDatabaseURL(StoreError):
    """The database URL cannot be understood."""

    code = "DD205"


class NotPermitted(StoreError):
    """The database user lacks a right."""

    code = "DD206"


class DatabaseFull(StoreError):
    """No space is left, or the database is read-only."""

    code = "DD207"


class SendError(DurableError):
    """A job could not be accepted as asked.

    Attributes:
      job_id(str): The id of the job.
    """

    code = "DD300"

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class NotRecorded(SendError):
    """No row could be written: nothing was queued."""

    code = "DD301"


class NotEncodable(SendError, TypeError):
    """The arguments cannot be encoded: nothing was queued."""

    code = "DD302"


class PayloadTooLarge(SendError, ValueError):
    """The encoded message is over the limit: nothing was queued."""

    code = "DD303"


class NotPublished(SendError):
    """The job is recorded, and will be published when the broker is back."""

    code = "DD304"


class StaleRun(SendError):
    """A run that lost its claim, or has ended, tried to send: nothing was queued."""

    code = "DD305"


class JobNotFound(DurableError, LookupError):
    """No job has this id."""

    code = "DD401"


class LeaseLost(Interrupt):
    """Raised inside a run whose job was taken over by another worker: nothing that it does counts any more."""

    code = "DD501"
