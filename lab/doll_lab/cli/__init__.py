"""Commands that `doll` has where doll-lab is installed."""
