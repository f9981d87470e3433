"""Views whose contents come while they are read, from one sparse file that is filled on demand."""
