"""The health port of a process: liveness, readiness, counts and depths, even while handlers block its event loop."""
