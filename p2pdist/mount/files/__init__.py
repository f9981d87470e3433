"""Trees shown as plain files: hard links, reflinks and copies."""
