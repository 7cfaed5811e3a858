"""`file:`: queues in a directory."""
