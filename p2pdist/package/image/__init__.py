"""SquashFS images of a package."""
