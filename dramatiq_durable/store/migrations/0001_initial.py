"""The record: jobs and what belongs to them."""

from __future__ import annotations

from dramatiq_durable.store.migrate import apply

_STATES = "'scheduled', 'queued', 'active', 'in_doubt', 'denied', 'parked', 'completed', 'failed', 'cancelled'"
_FINAL = "('completed', 'failed', 'cancelled')"

UP = [
    f"""
CREATE TABLE {{jobs}} (
    id TEXT NOT NULL PRIMARY KEY,
    state TEXT NOT NULL,
    queue TEXT NOT NULL,
    actor TEXT NOT NULL,
    agent TEXT NOT NULL,
    payload {{blob}} NOT NULL,
    options {{blob}},
    revision INTEGER NOT NULL DEFAULT 1,
    parent_id TEXT,
    origin TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    publish_at BIGINT,
    published_at BIGINT,
    broker_ref TEXT,
    publishes INTEGER NOT NULL DEFAULT 0,
    put_back INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    claim BIGINT NOT NULL DEFAULT 0,
    claimed_at BIGINT,
    lease_until BIGINT,
    beat BIGINT NOT NULL DEFAULT 0,
    started_at BIGINT,
    attempt INTEGER NOT NULL DEFAULT 0,
    retries INTEGER NOT NULL DEFAULT 0,
    lost_claims INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0,
    interruptions INTEGER NOT NULL DEFAULT 0,
    on_lost TEXT,
    alone INTEGER NOT NULL DEFAULT 0,
    finished_at BIGINT,
    reason TEXT,
    CONSTRAINT durable_jobs_state CHECK (state IN ({_STATES})),
    CONSTRAINT durable_jobs_final CHECK ((finished_at IS NOT NULL) = (state IN {_FINAL})),
    CONSTRAINT durable_jobs_active CHECK (
        state <> 'active' OR (owner IS NOT NULL AND claimed_at IS NOT NULL AND lease_until IS NOT NULL)
    ),
    CONSTRAINT durable_jobs_owner CHECK (owner IS NULL OR state IN ('active', 'in_doubt') OR state IN {_FINAL}),
    CONSTRAINT durable_jobs_lease CHECK (lease_until IS NULL OR state = 'active'),
    CONSTRAINT durable_jobs_started CHECK (
        started_at IS NULL OR state IN ('active', 'in_doubt') OR state IN {_FINAL}
    ),
    CONSTRAINT durable_jobs_publish CHECK (publish_at IS NULL OR state IN ('scheduled', 'queued')),
    CONSTRAINT durable_jobs_scheduled CHECK (state <> 'scheduled' OR publish_at IS NOT NULL),
    CONSTRAINT durable_jobs_on_lost CHECK (on_lost IN ('rerun', 'hold', 'fail')),
    CONSTRAINT durable_jobs_counters CHECK (
        revision >= 1 AND publishes >= 0 AND put_back >= 0 AND claim >= 0 AND beat >= 0 AND attempt >= 0
        AND retries >= 0 AND lost_claims >= 0 AND lost >= 0 AND interruptions >= 0
    )
)
""",
    "CREATE INDEX durable_jobs_open ON {jobs} (state, id) WHERE finished_at IS NULL",
    "CREATE INDEX durable_jobs_publish_at ON {jobs} (publish_at, id) WHERE publish_at IS NOT NULL",
    """
CREATE TABLE {attempts} (
    job_id TEXT NOT NULL,
    claim BIGINT NOT NULL,
    attempt INTEGER NOT NULL,
    owner TEXT NOT NULL,
    host TEXT,
    started_at BIGINT,
    ended_at BIGINT NOT NULL,
    ended TEXT NOT NULL,
    error_type TEXT,
    error_message TEXT,
    traceback TEXT,
    PRIMARY KEY (job_id, claim)
)
""",
    """
CREATE TABLE {results} (
    job_id TEXT NOT NULL,
    key TEXT NOT NULL,
    value {blob} NOT NULL,
    ttl BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    stored_at BIGINT,
    PRIMARY KEY (job_id, key)
)
""",
    "CREATE INDEX durable_results_pending ON {results} (created_at) WHERE stored_at IS NULL",
    """
CREATE TABLE {undecodable} (
    digest TEXT NOT NULL PRIMARY KEY,
    queue TEXT NOT NULL,
    payload {blob} NOT NULL,
    broker_ref TEXT,
    error TEXT NOT NULL,
    seen_at BIGINT NOT NULL,
    times INTEGER NOT NULL DEFAULT 1
)
""",
    """
CREATE TABLE {leaders} (
    name TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    taken_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
)
""",
    """
CREATE TABLE {workers} (
    owner TEXT NOT NULL PRIMARY KEY,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    threads INTEGER NOT NULL,
    queues TEXT NOT NULL,
    started_at BIGINT NOT NULL,
    seen_at BIGINT NOT NULL
)
""",
    """
CREATE TABLE {passes} (
    name TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    finished_at BIGINT NOT NULL,
    looked BIGINT NOT NULL DEFAULT 0,
    put_back BIGINT NOT NULL DEFAULT 0,
    requeued BIGINT NOT NULL DEFAULT 0,
    failed BIGINT NOT NULL DEFAULT 0,
    put_back_total BIGINT NOT NULL DEFAULT 0,
    requeued_total BIGINT NOT NULL DEFAULT 0,
    failed_total BIGINT NOT NULL DEFAULT 0
)
""",
]

DOWN = [
    f"DROP TABLE {{{table}}}"
    for table in ("passes", "workers", "leaders", "undecodable", "results", "attempts", "jobs")
]


def up(migrator, db):  # type: ignore[no-untyped-def]
    apply(db, UP)


def down(migrator, db):  # type: ignore[no-untyped-def]
    apply(db, DOWN)
