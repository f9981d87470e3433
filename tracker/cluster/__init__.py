"""Several trackers of one fleet: their common database, and what they ask each other."""
