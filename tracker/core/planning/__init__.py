"""Who receives from whom."""
