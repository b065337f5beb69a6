"""A model and its inputs -> Trace.  One file per seam."""
