"""The process that sends: it says in the journal what it is about to send and whether ``send()`` returned."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
import uuid
from typing import Any

import dramatiq
import redis

import dramatiq_durable as durable
from tests.torture import app, plan

#: How long one of the jobs lasts that occupy all threads at the end (seconds).
PROBE = 0.8


class Producer:
    """Sends what the seed says.

    Parameters:
      seed(int)
      seconds(float)
      direct(Redis): A connection past the proxy, for what is done behind everybody's back.
    """

    def __init__(self, seed: int, seconds: float, direct: Any) -> None:
        self.rng = random.Random(f"copies {seed}")
        self.jobs = plan.jobs(seed, seconds)
        self.until = time.monotonic() + seconds
        self.direct = direct
        self.sent: list[dramatiq.Message[Any]] = []

    def run(self) -> None:
        began = time.monotonic()
        for job in self.jobs:
            time.sleep(max(0.0, began + job.at - time.monotonic()))
            if time.monotonic() > self.until:
                # It was held up; what the torture is about has to come to an end.
                break
            getattr(self, f"do_{job.kind}", self.plain)(job.kind, **job.values)

    def send(self, kind: str, message: dramatiq.Message[Any], *, delay: int | None = None, **facts: Any) -> None:
        id = message.message_id
        app.journal.note("sending", id, {"kind": kind, "wall": app.wall(), "delay": delay, **facts})
        try:
            app.broker.enqueue(message, delay=delay)
        except durable.DurableError as e:
            app.journal.note("refused", id, str(e))
        else:
            app.journal.note("sent", id)
            self.sent.append(message)

    def plain(self, kind: str, callback: bool = False, **values: Any) -> None:
        actor = app.broker.get_actor(kind)
        options: dict[str, Any] = {"on_success": app.note_success} if callback else {}
        self.send(kind, actor.message_with_options(kwargs=values, **options), callback=callback, **values)

    def probe(self, count: int) -> None:
        """Send enough for every thread of every worker to have something to do."""
        for _ in range(count):
            self.send("probe", app.slow.message(PROBE))

    def do_delayed(self, kind: str, delay: int) -> None:
        self.send(kind, app.quick.message(kind), delay=delay)

    def do_pipeline(self, kind: str, stages: int, delay: int | None) -> None:
        root = uuid.uuid4().hex
        pipe = dramatiq.pipeline([app.stage.message(root, i) for i in range(stages)])
        self.send(kind, pipe.messages[0], delay=delay, stages=[m.message_id for m in pipe.messages])

    def do_copy(self, kind: str, which: float, stranded: bool) -> None:
        if not self.sent:
            return
        # A late message is likelier to be a recent one, but may be any.
        message = self.sent[-1 - int(which**2 * len(self.sent))]
        ref = str(uuid.uuid4())
        data = message.copy(options={"redis_message_id": ref, "durable_revision": 1}).encode()
        app.journal.note("copied", message.message_id, ref)
        with contextlib.suppress(redis.RedisError):
            self.put(message.queue_name, ref, data, stranded)

    def do_stranger(self, kind: str, delay: int | None, stranded: bool) -> None:
        """Do as a process does that is not equipped: nobody promises that its message arrives, but if it does, it runs
        as every other does."""
        message, queue = app.quick.message(kind), "default"
        if delay is not None:
            queue = "default.DQ"
            message = message.copy(queue_name=queue, options={"eta": app.wall() + delay})
        ref = str(uuid.uuid4())
        with contextlib.suppress(redis.RedisError):
            self.put(queue, ref, message.copy(options={"redis_message_id": ref}).encode(), stranded)

    def do_garbage(self, kind: str) -> None:
        with contextlib.suppress(redis.RedisError):
            self.put("default", str(uuid.uuid4()), b"\x00 not a message " + os.urandom(4), False)

    def put(self, queue: str, ref: str, data: bytes, stranded: bool) -> None:
        alive = self.direct.zrange("dramatiq:__heartbeats__", -1, -1) if stranded else []
        with self.direct.pipeline() as pipe:
            pipe.hset(f"dramatiq:{queue}.msgs", ref, data)
            if alive:
                pipe.sadd(f"dramatiq:__acks__.{alive[0].decode()}.{queue}", ref)
            else:
                pipe.rpush(f"dramatiq:{queue}", ref)
            pipe.execute()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--probe", type=int, help="only send so many jobs that show which threads are alive")
    parser.add_argument("--broker-port", type=int, required=True)
    given = parser.parse_args()
    direct = redis.Redis(host="127.0.0.1", port=given.broker_port, socket_timeout=1, retry=None)
    producer = Producer(given.seed, given.seconds, direct)
    if given.probe:
        producer.probe(given.probe)
    else:
        producer.run()


if __name__ == "__main__":
    main()
