"""Durable jobs for Dramatiq: the database is the record of every job, the queue only runs the work."""

from __future__ import annotations

__version__ = "0.1.0"
