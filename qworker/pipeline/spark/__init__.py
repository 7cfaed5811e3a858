"""The Spark code that the source and the jobs share: sessions, schemas, storage, paths and the text of its errors."""
