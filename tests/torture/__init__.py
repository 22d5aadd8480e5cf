"""A seeded torture: a fleet of real workers, a stream of jobs, faults at random, and an independent journal.

``python -m tests.torture --seed 7 --seconds 60 --database postgresql``
"""
