"""For those who test: the contract suite, a fake clock, and a pytest plugin."""
