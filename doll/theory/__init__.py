"""The theory of DOLL as a library: pure functions over numbers and numpy arrays, with units in their names.

Symbols, assumptions and corrections of the paper are in docs/theory.md.
"""
