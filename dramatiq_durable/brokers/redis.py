"""Redis, as :class:`dramatiq.brokers.redis.RedisBroker` uses it.

The keys are those that the header of Dramatiq's ``dispatch.lua`` documents: a list of copies' ids a queue, a hash of
their data beside it, and a set of fetched ids a process and queue.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dramatiq.common import current_millis
from dramatiq.errors import DecodeError
from dramatiq.message import Message

from ..store.types import Waiting
from .base import BrokerView, Publication

if TYPE_CHECKING:
    from dramatiq.broker import Consumer
    from dramatiq.brokers.redis import RedisBroker

__all__ = ["RedisView"]

#: Adds copies to a queue; a copy that is there already is not added twice, so the call may be repeated when its reply
#: was lost (redis-py repeats calls by itself).
_PUBLISH = """
for i = 1, #ARGV, 2 do
    if redis.call("hsetnx", KEYS[2], ARGV[i], ARGV[i + 1]) == 1 then
        redis.call("rpush", KEYS[1], ARGV[i])
    end
end
"""

#: Returns the positions of the ids that a hash does not have.
_ABSENT = """
local absent = {}
for i = 1, #ARGV do
    if redis.call("hexists", KEYS[1], ARGV[i]) == 0 then
        absent[#absent + 1] = i
    end
end
return absent
"""

#: Takes a copy out of a consumer's hands and puts it back into its queue, if it is still there.
_GIVE_BACK = """
if redis.call("srem", KEYS[1], ARGV[1]) == 1 and redis.call("hexists", KEYS[3], ARGV[1]) == 1 then
    redis.call("rpush", KEYS[2], ARGV[1])
end
"""

#: Removes a copy, if it still is in a consumer's hands.
_DISCARD = """
if redis.call("srem", KEYS[1], ARGV[1]) == 1 then
    redis.call("hdel", KEYS[2], ARGV[1])
end
"""

#: Returns a part of the ids that a hash has data for, without the data, and where to go on.
_IDS = """
local page = redis.call("hscan", KEYS[1], ARGV[1], "COUNT", ARGV[2])
local ids = {}
for i = 1, #page[2], 2 do
    ids[#ids + 1] = page[2][i]
end
return {page[1], ids}
"""

#: Gives copies a place in the list, if their data still is there.
_PLACE = """
for i = 1, #ARGV do
    if redis.call("hexists", KEYS[2], ARGV[i]) == 1 then
        redis.call("rpush", KEYS[1], ARGV[i])
    end
end
"""

#: How many ids one call names.
_CHUNK = 1000

#: How many ids of a list are read at a time when a whole queue has to be compared.
_LIST_CHUNK = 10_000

#: How many copies without a place are dealt with at a time.
_MISPLACED = 20_000


class RedisView(BrokerView):
    """Looks into Redis."""

    can_look = True
    broker: RedisBroker

    def __init__(self, broker: RedisBroker, enqueue: Callable[..., Message[Any]]) -> None:
        super().__init__(broker, enqueue)
        self._publish = broker.client.register_script(_PUBLISH)
        self._absent = broker.client.register_script(_ABSENT)
        self._give_back = broker.client.register_script(_GIVE_BACK)
        self._discard = broker.client.register_script(_DISCARD)
        self._ids = broker.client.register_script(_IDS)
        self._place = broker.client.register_script(_PLACE)

    def _keys(self, queue: str) -> tuple[str, str]:
        name = f"{self.broker.namespace}:{queue}"
        return name, f"{name}.msgs"

    def reference(self, message: Message[Any]) -> str:
        return str(message.options.get("redis_message_id", message.message_id))

    def publish(self, publications: Sequence[Publication]) -> list[Exception | None]:
        answers: list[Exception | None] = [None] * len(publications)
        by_queue: defaultdict[str, list[tuple[int, Message[Any], str, bytes]]] = defaultdict(list)
        for i, (message, queue, ref) in enumerate(publications):
            try:
                message = message.copy(options={"redis_message_id": ref})
                self.broker.emit_before("enqueue", message, None)
                by_queue[queue].append((i, message, ref, message.encode()))
            except Exception as e:
                answers[i] = e
        for queue, entries in by_queue.items():
            for start in range(0, len(entries), _CHUNK):
                self._publish_chunk(queue, entries[start : start + _CHUNK], answers)
        return answers

    def _publish_chunk(
        self, queue: str, entries: list[tuple[int, Message[Any], str, bytes]], answers: list[Exception | None]
    ) -> None:
        args: list[str | bytes] = []
        for _, _, ref, data in entries:
            args += (ref, data)
        try:
            self._publish(keys=self._keys(queue), args=args)
        except Exception as e:
            for i, _, _, _ in entries:
                answers[i] = e
        else:
            for _, message, _, _ in entries:
                self.broker.emit_after("enqueue", message, None)

    def missing(self, rows: Sequence[Waiting]) -> set[str]:
        found: set[str] = set()
        for queue, waiting in _by_queue(rows).items():
            _, data_key = self._keys(queue)
            for start in range(0, len(waiting), _CHUNK):
                chunk = waiting[start : start + _CHUNK]
                absent = self._absent(keys=[data_key], args=[row.broker_ref or "" for row in chunk])
                found.update(chunk[i - 1].id for i in absent)
        return found

    def misplaced(self, queues: set[str]) -> list[tuple[str, str]]:
        return [(queue, ref) for queue in sorted(queues.union(self._queues())) for ref in self._misplaced(queue)]

    def _misplaced(self, queue: str) -> list[str]:
        """Return the copies of a queue whose data is there, but whose place is not: neither in the list nor in hand."""
        list_key, data_key = self._keys(queue)
        fetched = self._fetched(queue)
        client: Any = self.broker.client
        # In a healthy queue every copy has one place.  Only if there are more data than places is the list read.
        if client.hlen(data_key) <= client.llen(list_key) + len(fetched):
            return []
        # Digests instead of the ids themselves: a queue may have a million.
        places = set(map(hash, fetched))
        # From the end: what is fetched at the other end meanwhile does not shift what is still to be read.
        end = -1
        while ids := client.lrange(list_key, end - _LIST_CHUNK + 1, end):
            places.update(hash(_text(ref)) for ref in ids)
            end -= _LIST_CHUNK
        found: list[str] = []
        cursor: Any = 0
        while True:
            cursor, ids = self._ids(keys=[data_key], args=[cursor, _CHUNK])
            found += [ref for ref in map(_text, ids) if hash(ref) not in places]
            if int(cursor) == 0 or len(found) >= _MISPLACED:
                return found

    def place(self, copies: Sequence[tuple[str, str]]) -> None:
        for queue in {queue for queue, _ in copies}:
            refs = [ref for name, ref in copies if name == queue]
            for start in range(0, len(refs), _CHUNK):
                self._place(keys=self._keys(queue), args=refs[start : start + _CHUNK])

    def _queues(self) -> list[str]:
        return sorted(self.broker.get_declared_queues() | self.broker.get_declared_delay_queues())

    def _fetched(self, queue: str) -> dict[str, str]:
        """Return the copies that consumers hold unacknowledged, with the key of the set each is in."""
        client: Any = self.broker.client
        prefix = f"{self.broker.namespace}:__acks__."
        owners = client.zrange(f"{self.broker.namespace}:__heartbeats__", 0, -1)
        keys = [f"{prefix}{_text(owner)}.{queue}" for owner in owners]
        held: dict[str, str] = {}
        # Every process that ever sent is among them, until the broker forgets it.
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            with client.pipeline(transaction=False) as pipe:
                for key in chunk:
                    pipe.smembers(key)
                for key, refs in zip(chunk, pipe.execute(), strict=True):
                    held.update((_text(ref), key) for ref in refs)
        return held

    def stranded(self, rows: Sequence[Waiting]) -> set[str]:
        found: set[str] = set()
        for queue, waiting in _by_queue(rows).items():
            fetched = self._fetched(queue)
            found.update(row.id for row in waiting if row.broker_ref in fetched)
        return found

    def discard(self, rows: Sequence[Waiting]) -> None:
        for queue, waiting in _by_queue(rows).items():
            fetched = self._fetched(queue)
            _, data_key = self._keys(queue)
            for row in waiting:
                if row.broker_ref in fetched:
                    self._discard(keys=[fetched[row.broker_ref], data_key], args=[row.broker_ref])

    def in_hand(self) -> list[tuple[str, str]]:
        return [(queue, ref) for queue in self._queues() for ref in self._fetched(queue)]

    def identify(self, copies: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        found: dict[tuple[str, str], str] = {}
        for queue, ref in copies:
            data: Any = self.broker.client.hget(self._keys(queue)[1], ref)
            with contextlib.suppress(DecodeError):
                id: Any = Message.decode(data).message_id if data is not None else None
                if isinstance(id, str) and "\0" not in id:
                    found[queue, ref] = id
        return found

    def give_back(self, copies: Sequence[tuple[str, str]]) -> None:
        for queue in {queue for queue, _ in copies}:
            fetched = self._fetched(queue)
            for ref in [ref for name, ref in copies if name == queue and ref in fetched]:
                self._give_back(keys=[fetched[ref], *self._keys(queue)], args=[ref])

    def has_fetched(self, consumer: Consumer) -> bool:
        return bool(getattr(consumer, "message_cache", None))

    def touch(self, queue_name: str) -> None:
        # Every command of Dramatiq's script renews the broker's own heartbeat; a fetch of nothing does only that.
        self.broker.do_fetch(queue_name, 0)

    def maintain(self) -> None:
        # Dramatiq does this now and then, by chance (0.1 % of its commands): on a quiet system what a dead process had
        # fetched stays where it is for hours.  Rows do not need it; messages that have none, and memory, do.
        broker = self.broker
        for queue in self._queues():
            arguments = [
                *("fetch", current_millis(), queue, broker.broker_id),
                *(broker.heartbeat_timeout, broker.dead_message_ttl, 1, broker._max_unpack_size(), 0),
            ]
            broker.scripts["dispatch"](args=arguments, keys=[broker.namespace])

    def reset_after_fork(self) -> None:
        # NOTE: Dramatiq makes the id with the broker object.  With one id for all, what a dead child had fetched would
        # belong to the living ones for ever.
        self.broker.broker_id = str(uuid.uuid4())

    def drop_undecodable(self, consumer: Consumer, payload: bytes) -> None:
        queue: str = consumer.queue_name  # type: ignore[attr-defined]
        _, data_key = self._keys(queue)
        acks_key = f"{self.broker.namespace}:__acks__.{self.broker.broker_id}.{queue}"
        client = self.broker.client
        # The id of a copy is inside its data, which cannot be read: so look through the few that we have fetched.
        for ref in client.smembers(acks_key):
            if client.hget(data_key, ref) == payload:
                client.srem(acks_key, ref)
                client.hdel(data_key, ref)
                return


def _by_queue(rows: Sequence[Waiting]) -> dict[str, list[Waiting]]:
    grouped: defaultdict[str, list[Waiting]] = defaultdict(list)
    for row in rows:
        grouped[row.queue].append(row)
    return grouped


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
