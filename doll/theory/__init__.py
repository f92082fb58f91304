"""The theory of DOLL as a library: pure functions of numbers and numpy arrays. Names of arguments state their units.

docs/theory.md lists the symbols, the assumptions and the corrections of the papers.
"""
