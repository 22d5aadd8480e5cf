"""The middlewares that users stack onto their broker; one idea each."""
