"""Services that note when the parts of a round begin and end, for benches."""
