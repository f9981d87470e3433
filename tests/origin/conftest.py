"""The fixtures of origin_rig, for all tests in this directory."""

from origin_rig import payload, place, s3, s3_server, web

__all__ = ["payload", "place", "s3", "s3_server", "web"]
