"""Code for studies, comparisons and reproductions with DOLL. Running jobs do not use it."""
