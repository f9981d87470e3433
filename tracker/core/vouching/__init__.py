"""Vouched piece lists: which hosts are believed, when lists are sent, and which host lied."""
