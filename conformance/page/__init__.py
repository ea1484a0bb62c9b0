"""A run, drawn: one HTML page that opens by a double click and needs no network."""
