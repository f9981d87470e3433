"""Content-addressed trees: packing, catalogs, packs, differences."""
