"""Packages in a layout or at an origin: push, notes, collection, torrents."""
