"""BitTorrent by libtorrent."""
