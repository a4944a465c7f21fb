"""The chapters of generation, from a model and prompts to text."""
