"""Blobs of the store: data, bitmap of verified pieces, copies."""
