"""EROFS images of metadata whose content lies in the store."""
