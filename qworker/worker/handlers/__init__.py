"""Where handlers run that must not block the event loop: in threads, or in processes of their own."""
