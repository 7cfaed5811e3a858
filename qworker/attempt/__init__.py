"""What runs around a handler: hooks, and the providers of its injected parameters."""
