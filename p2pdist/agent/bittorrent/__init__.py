"""The agent's BitTorrent side: one session, torrents, and a pull that comes by a swarm."""
