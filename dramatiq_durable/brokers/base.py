"""What every broker offers, and the little that can be assumed of one that nobody has described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dramatiq.logging import get_logger

from ..store.types import Waiting

if TYPE_CHECKING:
    from dramatiq import Broker, Message
    from dramatiq.broker import Consumer

__all__ = ["BrokerView", "Publication"]

#: A message, the queue it goes to, and the reference under which its row expects it.
Publication = tuple["Message[Any]", str, str]


class BrokerView:
    """A broker that cannot be looked into.

    Parameters:
      broker(Broker)
      enqueue(Callable): The broker's own ``enqueue``, not the wrapped one.
    """

    #: Whether :meth:`missing` knows.  If not, a job is published again when it has waited for a long time: the claim
    #: makes a wrong guess harmless.
    can_look = False

    def __init__(self, broker: Broker, enqueue: Callable[..., Message[Any]]) -> None:
        self.logger = get_logger(__name__, type(self))
        self.broker = broker
        self.enqueue = enqueue

    def reference(self, message: Message[Any]) -> str:
        """Return the broker's own id of the copy that is about to be published."""
        return message.message_id

    def publish(self, publications: Sequence[Publication]) -> list[Exception | None]:
        """Hand messages to the broker.

        Returns:
          list[Exception | None]: For each of them, what went wrong.
        """
        answers: list[Exception | None] = []
        for message, _, _ in publications:
            try:
                self.enqueue(message)
                answers.append(None)
            except Exception as e:
                answers.append(e)
        return answers

    def missing(self, rows: Sequence[Waiting]) -> set[str]:
        """Return the ids of those *rows* whose published copy is not in the broker any more."""
        raise NotImplementedError

    def stranded(self, rows: Sequence[Waiting]) -> set[str]:
        """Return the ids of those *rows* whose copy was handed to a consumer and never acknowledged."""
        return set()

    def discard(self, rows: Sequence[Waiting]) -> None:
        """Remove stranded copies whose jobs have been put back."""

    def in_hand(self) -> Iterable[tuple[str, str]]:
        """Return all copies (queue and reference) that were handed to consumers and not acknowledged."""
        return ()

    def identify(self, copies: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Return of which jobs *copies* are; those that are gone or cannot be read are missing."""
        return {}

    def give_back(self, copies: Sequence[tuple[str, str]]) -> None:
        """Put copies that are in consumers' hands back into their queues."""

    def misplaced(self, queues: set[str]) -> Sequence[tuple[str, str]]:
        """Return copies (queue and reference) that are in the broker, but where nobody would ever fetch them: in
        *queues*, and in those that this process knows of.
        """
        return ()

    def place(self, copies: Sequence[tuple[str, str]]) -> None:
        """Put such copies back into their queues; one that was there after all is there twice, which does no harm."""

    def has_fetched(self, consumer: Consumer) -> bool:
        """Return whether the next message of *consumer* is in memory already, so that asking for it does not wait."""
        return False

    def touch(self, queue_name: str) -> None:
        """Show the broker that this process is alive, while it fetches nothing."""

    def maintain(self) -> None:
        """Have the broker give back what dead processes had fetched, where it does not do so by itself."""

    def reset_after_fork(self) -> None:
        """This process is the child of a fork: for the broker it must be another one than its parent."""

    def drop_undecodable(self, consumer: Consumer, payload: bytes) -> None:
        """Remove a payload that nobody can decode and that has been kept elsewhere."""
