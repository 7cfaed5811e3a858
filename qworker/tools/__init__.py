"""What an operator runs: check a store, explain a message, move a queue, run a program for each message."""
