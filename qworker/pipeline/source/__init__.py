"""The Spark data source: rows of a queue, read in batches or as a stream, and rows that are published."""
