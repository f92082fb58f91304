"""Which markets the workers run on: rules, planner, forecast, assessment, baselines. Pure."""
