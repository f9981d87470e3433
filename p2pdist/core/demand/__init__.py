"""What readers at this host wait for, while a blob comes."""
