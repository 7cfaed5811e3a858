"""What stores that are directories share."""
