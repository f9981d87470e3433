"""The directory that is packed: what is in it, what is left out, how it is split."""
