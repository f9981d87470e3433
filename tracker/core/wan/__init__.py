"""The WAN of sites: what may cross it, and what has."""
