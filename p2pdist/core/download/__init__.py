"""Receiving one blob by streams, from sources that a tracker names or that are found without."""
