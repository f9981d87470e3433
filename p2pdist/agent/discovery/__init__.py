"""How agents find trackers and each other on the local network, and plan without a tracker."""
