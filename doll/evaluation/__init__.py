"""What the job achieves: prequential and held-out error, update rates against theory, plots."""
