"""What we may know of a broker: how to hand it many messages at once, and what it has lost."""
