"""A shop that confirms its orders in the background."""
