"""Makes short stories with a fixed grammar, one per line: python make_text.py 3000 > stories.txt

The person who begins a story also ends it, and an item that is asked for is given or kept. A model must remember both.
"""

from __future__ import annotations

import random
import sys

WHO = ["miller", "weaver", "fisher", "baker", "shepherd", "potter", "sailor", "tailor", "gardener", "hunter"]
LOOKS = ["old", "young", "tall", "quiet", "merry", "tired", "clever", "lonely"]
ANIMALS = ["fox", "heron", "badger", "owl", "hare", "otter", "raven", "bear"]
PLACES = ["river", "forest", "mill", "harbour", "market", "meadow", "bridge", "mountain"]
THINGS = ["bread", "rope", "honey", "salt", "water", "wool", "candles", "apples"]
WAYS = ["slowly", "early", "gladly", "softly", "alone", "again"]
MEETS = ["met", "found", "saw", "woke", "followed"]


def story(rng: random.Random) -> str:
    who, animal, thing = rng.choice(WHO), rng.choice(ANIMALS), rng.choice(THINGS)
    gives = rng.random() < 0.5
    return (
        f"the {rng.choice(LOOKS)} {who} went {rng.choice(WAYS)} to the {rng.choice(PLACES)} and {rng.choice(MEETS)} "
        f"the {animal} and asked the {animal} for {thing} but the {animal} "
        + (f"gave {thing} and the {who} went home" if gives else f"kept the {thing} and the {who} stayed there")
    )


if __name__ == "__main__":
    generator = random.Random(0)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3000):
        sys.stdout.write(story(generator) + "\n")
