"""What our middlewares have in common: none works on a broker that was not equipped with ``install()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dramatiq.logging import get_logger
from dramatiq.middleware import Middleware

from ..errors import ConfigurationError, DurableError, NotInstalled

if TYPE_CHECKING:
    from dramatiq import Broker, Message, Worker

    from ..runtime.engine import Engine

__all__ = ["DurableMiddleware", "boot"]


@contextlib.contextmanager
def boot() -> Iterator[None]:
    """Let nothing that fails at the start of a worker be swallowed by the broker, which would go on without it.

    Raises:
      DurableError: Whatever went wrong.
    """
    try:
        yield
    except DurableError:
        raise
    except Exception as e:
        raise ConfigurationError(f"The worker was not started ({type(e).__name__}: {e}).") from e


class DurableMiddleware(Middleware):
    """Base class.  Until ``install()`` has bound it, every send and every worker start is refused."""

    def __init__(self) -> None:
        self.logger = get_logger(__name__, type(self))
        self._engine: Engine | None = None

    def bind(self, engine: Engine) -> None:
        """Called by ``install()``."""
        self._engine = engine

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise NotInstalled(
                f"{type(self).__name__} was added to the broker, but the broker was not equipped: delays, "
                f"follow-ups and "
                "claims would not be recorded. Nothing was sent or started. Call dramatiq_durable.install(broker), or "
                f"install(broker, middleware=[..., {type(self).__name__}()]), instead of broker.add_middleware()."
            )
        return self._engine

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int) -> None:
        self.engine  # noqa: B018

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self.engine  # noqa: B018
