"""Trees as plain files: hard links, reflinks and copies."""
