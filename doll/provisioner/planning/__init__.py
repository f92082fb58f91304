"""The choice of markets for the workers: rules, planner, forecast, assessment, baselines. Pure."""
