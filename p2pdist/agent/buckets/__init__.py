"""The buckets of an agent: what S3 clients of this host read through it."""
