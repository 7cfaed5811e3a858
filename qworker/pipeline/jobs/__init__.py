"""The jobs of the pipeline: load, archive, replay, dedupe and reconcile."""
