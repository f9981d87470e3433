"""The process that keeps readers of a lazy view waiting, and how an agent speaks with it."""
