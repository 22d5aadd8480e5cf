"""A fleet that starts together."""

from __future__ import annotations

from dramatiq_durable.store import reading
from tests.acceptance.conftest import World
from tests.servers import wait_until


def test_twenty_workers_that_start_at_once_put_each_lost_job_back_once(world: World) -> None:
    """DESIGN 8: one pass at a time over all of them; a fleet that restarts floods neither database nor broker."""
    # Given many queued jobs of which the broker knows nothing any more
    sent = [world.app.quick.send(i) for i in range(200)]
    world.valkey.flush()
    # When twenty worker processes start at the same moment
    for _ in range(20):
        world.fleet.start(threads=1, ready=False)
    wait_until(lambda: reading.counts(world.db) == {"completed": 200}, 150, "all jobs are completed")
    # Then each was put back once and ran once, by whoever leads
    rows = [world.job(message.message_id) for message in sent]
    assert {row.put_back for row in rows} == {1}
    assert {row.publishes for row in rows} == {2}
    assert all(world.journal.count("begin", message.message_id) == 1 for message in sent[:20])
    wait_until(lambda: len(reading.workers(world.db, 60_000)) == 20, 60, "all have enlisted")
