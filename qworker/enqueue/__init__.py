"""The parts that only a producer needs: enqueueing from threads, and the trace context of a call."""
