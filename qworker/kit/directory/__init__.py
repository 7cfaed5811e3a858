"""The code that stores in directories share."""
