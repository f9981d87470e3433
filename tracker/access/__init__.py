"""Access of a fleet, as its tracker decides it: the access file, keys, identities, tickets."""
