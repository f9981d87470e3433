"""Streams: the pieces of one stripe over HTTP."""
