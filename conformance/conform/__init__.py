"""`omni-prefix conform`: many random traces on the drivers, what they covered, and one small trace of what failed."""
