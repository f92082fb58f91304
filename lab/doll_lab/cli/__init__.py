"""Commands that `doll` has if doll-lab is installed."""
