"""Packages in a layout or at an origin: pushing, leases, collection, torrents."""
