"""The page of a run: one document, and the JSON that it asks for, of files or of a live driver."""
