"""Between rows and messages: the mark that our messages carry, and how each is made from the other."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from dramatiq.common import current_millis, q_name
from dramatiq.message import Message, get_encoder

from ..errors import NotEncodable, PayloadTooLarge
from ..store.types import Due, NewJob, Payload

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy
    from dramatiq.encoder import Encoder

__all__ = ["MARK", "ROUND", "child_id", "encode_options", "flaw_of", "marked", "new_job", "rebuild", "revision_of"]

#: The option that every message published by us carries: which version of the row's input it was made from.  A message
#: with this mark and without a row belongs to a job that was pruned, and is never run.
MARK = "durable_revision"

#: The option that counts how often a job has asked to be run again: each such round sends jobs of its own, while the
#: retries of one send nothing twice.
ROUND = "durable_round"

#: Options that belong to one copy of a message, not to the job.
_COPY_OPTIONS = ("redis_message_id", "eta", "traceback", MARK)


#: The longest id or name that an index takes everywhere (characters).
MAX_NAME = 500

#: The latest time that a delayed message may name (epoch milliseconds): the year 9999.
MAX_TIME = 253_402_300_799_999


def flaw_of(message: Message[Any] | MessageProxy) -> str | None:
    """Return what keeps *message* from being recorded, in words; ``None`` for any that Dramatiq itself has made."""
    if not isinstance(message.options, dict):
        return "its options are no mapping"
    names = {"id": message.message_id, "queue": message.queue_name, "actor": message.actor_name}
    for what, name in names.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not _is_storable(name):
            return f"its {what} is no name of 1 to {MAX_NAME} characters"
    if not _is_storable(str(message.options.get("agent"))):
        return "its agent is no name"
    return None


def _is_storable(text: str) -> bool:
    """Return whether every database takes *text*: no NUL, no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def due_time(eta: Any) -> int | None:
    """Return the time at which a message with this ``eta`` is due, or ``None`` if it makes no sense: then it is now."""
    if isinstance(eta, bool) or not isinstance(eta, (int, float)) or eta != eta:
        return None
    return int(max(0, min(eta, MAX_TIME)))


def until_due(message: Message[Any] | MessageProxy) -> int:
    """Return for how many milliseconds *message* asks to wait with its own ``eta``; 0 if it does not."""
    due = due_time(message.options.get("eta"))
    return 0 if due is None else max(0, due - current_millis())


def marked(message: Message[Any], revision: int = 1) -> Message[Any]:
    """Return a copy of *message* that carries our mark."""
    return message.copy(options={MARK: revision})


def revision_of(message: Message[Any] | MessageProxy) -> int | None:
    """Return the revision that *message* was made from, or ``None`` when it was not published by us."""
    revision = message.options.get(MARK)
    return revision if isinstance(revision, int) else None


def round_of(message: Message[Any] | MessageProxy) -> int:
    """Return how often the job of *message* has asked to be run again."""
    value = message.options.get(ROUND)
    return value if isinstance(value, int) else 0


def child_id(parent_id: str, actor_name: str, ordinal: int, round: int = 0) -> str:
    """Derive the id of a job that a run sends, so that a rerun of the parent sends the same job and not another one.

    Parameters:
      parent_id(str): The running job.
      actor_name(str): The actor that is sent to.
      ordinal(int): How many jobs the run has sent to that actor before.
      round(int): How often the job has asked to be run again before.

    Returns:
      str: A UUID (version 5: a digest of a name, RFC 9562 §5.5).
    """
    name = f"dramatiq-durable:{parent_id}:{actor_name}:{ordinal}"
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}:{round}" if round else name))


def encode(message: Message[Any], max_payload: int | None) -> bytes:
    """Encode *message*, or say why that cannot be.

    Raises:
      NotEncodable: If the encoder refuses an argument or option.
      PayloadTooLarge: If the result has more than *max_payload* bytes.
    """
    flaw = flaw_of(message)
    if flaw is not None:
        raise NotEncodable(
            f"Job {message.message_id!r} for actor {message.actor_name!r} was not queued: {flaw}.",
            job_id=str(message.message_id),
        )
    try:
        data: bytes = message.encode()
    except Exception as e:
        raise NotEncodable(
            f"Job {message.message_id} for actor {message.actor_name!r} was not queued: its arguments or options "
            f"cannot "
            f"be encoded ({type(e).__name__}: {e}). Send values that the encoder knows, or ids instead of objects.",
            job_id=message.message_id,
        ) from e
    if max_payload is not None and len(data) > max_payload:
        raise PayloadTooLarge(
            f"Job {message.message_id} for actor {message.actor_name!r} was not queued: its message has {len(data)} "
            f"bytes and the limit is {max_payload} (setting max_payload). Store the data elsewhere and send its id.",
            job_id=message.message_id,
        )
    return data


def new_job(
    broker: Broker,
    message: Message[Any],
    *,
    max_payload: int | None,
    delay: int | None = None,
    due_at: int | None = None,
    broker_ref: str | None = None,
    parent_id: str | None = None,
    origin: str = "sent",
    parked: str | None = None,
) -> NewJob:
    """Make the row for *message*; parameters and errors as in :func:`encode` and :class:`NewJob`."""
    actor = broker.actors.get(message.actor_name)
    agent = message.options.get("agent") or (actor and actor.options.get("agent")) or message.actor_name
    return NewJob(
        id=message.message_id,
        queue=q_name(message.queue_name),
        actor=message.actor_name,
        agent=str(agent),
        payload=encode(message, max_payload),
        delay=delay,
        due_at=due_at,
        broker_ref=broker_ref,
        parent_id=parent_id,
        origin=origin,
        parked=parked,
    )


def encode_options(options: dict[str, Any]) -> bytes:
    """Encode the options that a later run of the job is to carry."""
    kept = {name: value for name, value in options.items() if name not in _COPY_OPTIONS}
    encoder = get_encoder()
    try:
        data: bytes = encoder.encode(kept)
    except Exception:
        # Something that a middleware keeps there for the time of the run (a span, a timer) must not cost the retry.
        data = encoder.encode({name: value for name, value in kept.items() if _can_encode(encoder, value)})
    return data


def _can_encode(encoder: Encoder, value: Any) -> bool:
    try:
        encoder.encode({"value": value})
    except Exception:
        return False
    return True


def rebuild(row: Payload | Due) -> Message[Any]:
    """Make the message that a row asks for.

    Raises:
      DecodeError: If the payload cannot be decoded with this process's encoder.
    """
    message = Message.decode(row.payload)
    options = dict(message.options) if row.options is None else dict(get_encoder().decode(row.options))
    for name in _COPY_OPTIONS:
        options.pop(name, None)
    options[MARK] = row.revision
    if row.retries or "retries" in options:
        options["retries"] = row.retries
    return Message(
        queue_name=q_name(message.queue_name),
        actor_name=message.actor_name,
        args=message.args,
        kwargs=message.kwargs,
        options=options,
        message_id=message.message_id,
        message_timestamp=message.message_timestamp,
    )
