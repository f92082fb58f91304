"""What studies, comparisons and reproductions with DOLL use, and a running job does not."""
