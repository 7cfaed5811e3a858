"""What the source and the jobs need of Spark: sessions, schemas, storage, paths and the text of its errors."""
