"""Objects of the store: the content of files, each stored once."""
