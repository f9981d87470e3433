"""Bringing packages, trees and blobs into the store."""
