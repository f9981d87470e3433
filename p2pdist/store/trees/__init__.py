"""Trees of the store: assembled from packs, with their images and variants."""
