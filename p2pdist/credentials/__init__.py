"""Keys, certificates and tokens of a fleet."""
