"""Wrong variants of WSP, which tests must see."""

from __future__ import annotations

from doll.ps.policies.wsp import Wsp


class OneWaveLooser(Wsp):
    def needed(self, batch: int, offset: int) -> int:
        return super().needed(batch, offset) - 1


class Ungated(Wsp):
    def needed(self, batch: int, offset: int) -> int:
        return 0
