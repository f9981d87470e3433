"""Views whose contents come while they are read: one sparse file that is filled on demand."""
