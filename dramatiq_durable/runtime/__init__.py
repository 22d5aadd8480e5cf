"""The moving parts of one process: claims it holds, and the threads that write, acknowledge, renew and publish."""
