"""The tracker's BitTorrent announce."""
