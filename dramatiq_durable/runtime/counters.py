"""Counts of what happened in this process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Since the process started.

    Attributes:
      publish_failures(int): Sends and due jobs that the broker did not take at once.
      adopted(int): Messages of unequipped processes that were given a row.
      parked(int): Messages that nobody here may run.
      duplicates(int): Copies that were acknowledged without doing anything.
      undecodable(int): Payloads that could not be read and were kept aside.
      refused(int): Outcomes that the fence refused: the job was someone else's by then.
      lost(int): Runs of this process that were taken over while they ran.
    """

    publish_failures: int = 0
    adopted: int = 0
    parked: int = 0
    duplicates: int = 0
    undecodable: int = 0
    refused: int = 0
    lost: int = 0
