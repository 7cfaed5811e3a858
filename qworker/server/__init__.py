"""The mq HTTP endpoints on any backend, with additions that a plain mq client never notices."""
