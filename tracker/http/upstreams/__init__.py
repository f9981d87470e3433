"""Routes for what is read upstream once for the fleet: images, and a hub of models."""
