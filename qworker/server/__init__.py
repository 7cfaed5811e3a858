"""The HTTP server: mq's endpoints on any backend, with additions that plain mq clients do not use."""
