"""Equip a broker: the one place where anything of Dramatiq's is wrapped, and where that is undone.

What is wrapped, on this one broker object and nowhere else: ``broker.enqueue`` (delays, follow-ups, sends of running
jobs), ``broker.consume`` (claims a fetched batch, acknowledges after the commit), the ``_store`` of each results
backend (results become part of the outcome), and on a StubBroker ``join`` (so that it waits for retries that the
database keeps).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dramatiq.worker import _WorkerMiddleware

from .brokers.base import BrokerView
from .errors import AlreadyInstalled, MissingPiece, WrongOrder
from .middleware.base import DurableMiddleware
from .middleware.capture import CaptureOutcome
from .middleware.reconciler import Reconciler
from .middleware.record import DurableRecord
from .runtime.capture import catch_results, release_results, results_of
from .runtime.engine import Engine
from .runtime.options import Options
from .store import migrate, reading
from .store.database import Database, connect

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.middleware import Middleware

    from .settings import Settings

__all__ = ["Durable", "install"]


class Durable:
    """The handle of an equipped broker.

    Attributes:
      broker(Broker): The broker.
      db(Database): The record.
      engine(Engine): This process's moving parts.
    """

    def __init__(self, broker: Broker, db: Database, engine: Engine, middleware: Sequence[Middleware]) -> None:
        self.broker = broker
        self.db = db
        self.engine = engine
        self._middleware = list(middleware)

    def uninstall(self) -> None:
        """Undo ``install()``: unwrap the broker, take the middlewares out, stop the threads, close the connections."""
        self.engine.stop()
        for name in ("enqueue", "consume", "join"):
            self.broker.__dict__.pop(name, None)
        for results in results_of(self.broker):
            release_results(results.backend)
        self.broker.middleware[:] = [m for m in self.broker.middleware if m not in self._middleware]
        self.broker.__dict__.pop("durable", None)
        self.db.close_all()


def install(
    broker: Broker,
    *,
    settings: Settings | None = None,
    middleware: Sequence[DurableMiddleware] | None = None,
    **overrides: Any,
) -> Durable:
    """Equip *broker*: record every job, claim before work, reconcile what is lost.

    Call it once, after the broker and its other middlewares are set up and before actors are declared.

    Parameters:
      broker(Broker)
      settings(Settings): Read from ``DRAMATIQ_DURABLE_*`` and ``.env`` if not given.
      middleware(Sequence[DurableMiddleware]): The pieces to use, instead of all of them.
      **overrides: Any setting, by its name; wins over the environment.

    Raises:
      AlreadyInstalled: If this broker has been equipped.
      InvalidSettings: If settings make no sense.
      MissingPiece: If a piece needs another one.
      StoreError: If the database cannot be used.

    Returns:
      Durable: The handle.

    Example:
      >>> broker = RedisBroker(url="redis://127.0.0.1:6379/0")
      >>> dramatiq_durable.install(broker)
    """
    if "durable" in broker.__dict__ or any(isinstance(m, DurableMiddleware) for m in broker.middleware):
        raise AlreadyInstalled(
            "This broker has dramatiq-durable middlewares already. Call install() once, and do not add them with "
            "broker.add_middleware() beside it."
        )
    pieces = list(middleware) if middleware is not None else [DurableRecord(), Reconciler()]
    _check_pieces(pieces)
    if settings is None:
        from .settings import Settings

        settings = Settings(**overrides)
    elif overrides:
        settings = type(settings)(**{**settings.model_dump(), **overrides})
    options = Options(**{name: getattr(settings, name) for name in Options.__dataclass_fields__})
    db = connect(settings.database_url, pool_size=settings.pool_size)
    _create_own_tables(db, settings)

    plain_enqueue, plain_consume = broker.enqueue, broker.consume
    engine = Engine(
        broker,
        db,
        options,
        _view(broker, plain_enqueue),
        plain_enqueue=plain_enqueue,
        plain_consume=plain_consume,
        connect=lambda: connect(settings.database_url, pool_size=1),
        check_order=check_order,
        check_worker=check_worker,
    )
    for piece in pieces:
        piece.bind(engine)
        first = piece is pieces[0] and broker.middleware
        broker.add_middleware(piece, before=type(broker.middleware[0]) if first else None)
    _wrap(broker, engine)
    handle = Durable(broker, db, engine, pieces)
    broker.durable = handle  # type: ignore[attr-defined]
    return handle


def _check_pieces(pieces: list[DurableMiddleware]) -> None:
    if not any(isinstance(piece, DurableRecord) for piece in pieces):
        raise MissingPiece(
            "The record is missing: every other piece builds on it. Add DurableRecord() to install(middleware=[...])."
        )
    for kind in {type(piece) for piece in pieces}:
        if sum(type(piece) is kind for piece in pieces) > 1:
            raise AlreadyInstalled(f"{kind.__name__} is given twice to install(); give it once.")
    if not any(isinstance(piece, CaptureOutcome) for piece in pieces):
        pieces.append(CaptureOutcome())
    pieces.sort(key=lambda piece: isinstance(piece, CaptureOutcome) - isinstance(piece, DurableRecord))


def _create_own_tables(db: Database, settings: Settings) -> None:
    """Create the tables of an embedded database outside production; any other database is migrated by its operator."""
    if db.dialect.name == "sqlite" and settings.profile != "production":
        migrate.upgrade(db)


def _view(broker: Broker, enqueue: Any) -> BrokerView:
    """Return what we know of this kind of broker; judged by its classes, so that no client library is imported."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(broker).__mro__}
    if "dramatiq.brokers.redis.RedisBroker" in kinds:
        from .brokers.redis import RedisView

        return RedisView(broker, enqueue)  # type: ignore[arg-type]
    if "dramatiq.brokers.stub.StubBroker" in kinds:
        from .brokers.stub import StubView

        return StubView(broker, enqueue)
    return BrokerView(broker, enqueue)


def _wrap(broker: Broker, engine: Engine) -> None:
    from .brokers.stub import StubView, joining

    broker.enqueue = engine.sender.enqueue  # type: ignore[method-assign]
    broker.consume = engine.consume  # type: ignore[method-assign]
    for results in results_of(broker):
        catch_results(results.backend)
    if isinstance(engine.view, StubView):
        join = joining(engine.view.broker, lambda queue: reading.unfinished(engine.db, queue))
        broker.join = join  # type: ignore[method-assign]


def check_order(broker: Broker) -> None:
    """Raise when our middlewares do not stand where they must.

    Raises:
      WrongOrder: If another middleware stands before the first of ours or after the last.
      MissingPiece: If a worker would run without a piece that recovery needs.
    """
    stack = [m for m in broker.middleware if not isinstance(m, _WorkerMiddleware)]
    if not stack or not isinstance(stack[0], DurableRecord):
        raise WrongOrder(
            f"{type(stack[0]).__name__ if stack else 'Nothing'} stands before DurableRecord, so it would still act "
            f"on a job "
            "whose outcome is decided. Add it before you call install(), or with add_middleware(..., "
            "after=DurableRecord)."
        )
    if not isinstance(stack[-1], CaptureOutcome):
        raise WrongOrder(
            f"{type(stack[-1]).__name__} was added after install(), so it would change messages after their row is "
            f"written "
            "and act on jobs that may not start. Add it before you call install(), or with add_middleware(..., "
            "after=DurableRecord)."
        )
    for results in results_of(broker):
        # A results middleware that was put between ours after install() has not been caught yet.
        catch_results(results.backend)


def check_worker(broker: Broker) -> None:
    """Raise when a worker on *broker* could not keep its promises.

    Raises:
      ConfigurationError: Naming what is missing.
    """
    check_order(broker)
    if not any(isinstance(m, Reconciler) for m in broker.middleware):
        raise MissingPiece(
            "The Reconciler is missing: nobody would put right what the queue loses or what dead workers leave "
            "behind. Add "
            "Reconciler() to install(middleware=[...])."
        )
