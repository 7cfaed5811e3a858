"""The runners of handlers that must not block the event loop: threads and processes."""
