"""The figures and tables of the DOLL paper, one seeded script each, on the production theory, simulator and planner.

`make paper` runs all of them. `python -m benchmarks.paper.fig3 [--quick] [--out FOLDER]` runs one.
"""
