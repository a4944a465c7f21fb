"""What a user runs beside the road from text to text."""
