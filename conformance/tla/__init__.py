"""The bridge to TLC: run it, read what it says, and exchange values and traces with it."""
