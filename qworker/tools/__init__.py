"""The tools of operators: check a store, explain a message, move a queue, run a program for each message."""
