"""When a row of scores counts as masked whole: the same rule for every framework."""

LOWEST = -3e4
"""A row of scores that are all below this may be masked as a whole, if they also lie together ..."""

SPREAD = 256.0
"""... within what scores differ by before a mask is added to them, ..."""

EVEN = 1e-2
"""... which is no more than this share of them, ..."""

STEPS = 4
"""... or within so many steps of the number format: a low number swallows the scores that it is added to."""
