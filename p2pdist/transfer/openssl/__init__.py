"""Both ends of TLS connections by pyOpenSSL, whose OpenSSL is newer than most interpreters'."""
