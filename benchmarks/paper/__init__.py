"""The figures and tables of the DOLL paper and of MLLess, one seeded script each.

They run the production theory, simulator, planner and tuner.
`make paper` runs all of them. `python -m benchmarks.paper.fig3 [--quick] [--out FOLDER]` runs one.
"""
