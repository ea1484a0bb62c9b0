"""What a newcomer runs first: the worked example, then thousands of random requests, cache on against cache off."""
