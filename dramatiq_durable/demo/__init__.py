"""The product proving itself on this machine: real workers, real kills, and a journal that the jobs write."""
