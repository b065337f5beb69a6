"""When a row of scores counts as masked whole: the same rule for every framework."""

LOWEST = -3e4
"""A row of scores that are all below this may be masked as a whole, if they are also the same ..."""

EVEN = 1e-2
"""... but for this share of them."""
