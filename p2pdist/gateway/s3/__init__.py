"""The S3 interface of an agent: programs read objects through it, and write none."""
