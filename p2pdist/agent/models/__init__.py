"""Models and data sets of the fleet's hub on one host."""
