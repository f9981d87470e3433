"""Several trackers that share the swarms, in a simulation."""
