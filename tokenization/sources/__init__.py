"""Files that are not plain text. Each kind has a function that yields the text of the documents of an open file, or the
rows of a table."""
