"""What a process tells of itself over HTTP: alive, ready, counts and depths, while handlers may block its loop."""
